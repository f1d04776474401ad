//! Time and bandwidth against tokens, as SVG.

use std::error::Error;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::record::{Limits, Phase, Record};

const SIZE: (u32, u32) = (900, 600);
/// Lines of the grid.
const GRID: RGBColor = RGBColor(232, 232, 232);
/// Axes and their labels.
const INK: RGBColor = RGBColor(90, 90, 90);
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// The least time that a logarithmic axis begins with, in microseconds.
const LEAST_TIME: f64 = 0.01;

/// A line of a plot.
struct Series {
    name: String,
    points: Vec<(f64, f64)>,
}

/// A plot.
struct Plot {
    file: String,
    title: String,
    unit: &'static str,
    log_y: bool,
    series: Vec<Series>,
}

/// Writes two plots each of dispatch and combine into `folder`.
///
/// # Errors
/// The folder cannot be written.
pub fn plot(folder: &Path, records: &[Record], limits: Option<&Limits>) -> Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    std::fs::create_dir_all(folder)?;
    for (name, pick) in [
        ("dispatch", dispatch as fn(&Record) -> &Phase),
        ("combine", combine),
    ] {
        for plot in [
            times(name, records, pick),
            bandwidths(name, records, pick, limits),
        ] {
            draw(&folder.join(&plot.file), &plot)
                .map_err(|error| anyhow!("{}: {error}", plot.file))?;
        }
    }
    Ok(())
}

fn dispatch(record: &Record) -> &Phase {
    &record.dispatch
}

fn combine(record: &Record) -> &Phase {
    &record.combine
}

/// A line for each kind of record; the cache is in the state of the first record.
fn lines(records: &[Record], suffix: &str, value: impl Fn(&Record) -> Option<f64>) -> Vec<Series> {
    let mut lines: Vec<Series> = Vec::new();
    for record in records
        .iter()
        .filter(|record| record.l2_flushed == records[0].l2_flushed)
    {
        let name = format!("{} {}{suffix}", record.format, record.mode);
        let Some(value) = value(record) else { continue };
        let point = (record.tokens as f64, value);
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => lines.push(Series {
                name,
                points: vec![point],
            }),
        }
    }
    lines
}

fn times(name: &str, records: &[Record], pick: fn(&Record) -> &Phase) -> Plot {
    let mut series = lines(records, "", |record| Some(pick(record).gpu_us.median));
    series.extend(lines(records, ", wire limit", |record| {
        pick(record).floor_us
    }));
    // The same for all kinds.
    let nccl = lines(records, "", |record| pick(record).nccl_us)
        .into_iter()
        .next();
    series.extend(nccl.map(|line| Series {
        name: "NCCL".into(),
        ..line
    }));
    Plot {
        file: format!("{name}-time.svg"),
        title: format!("{name}: GPU time, {} GPUs", records[0].ranks),
        unit: "µs",
        log_y: true,
        series,
    }
}

fn bandwidths(
    name: &str,
    records: &[Record],
    pick: fn(&Record) -> &Phase,
    limits: Option<&Limits>,
) -> Plot {
    let mut series = lines(records, "", |record| Some(pick(record).gb_per_s));
    let ends =
        [records.first(), records.last()].map(|record| record.map_or(1.0, |r| r.tokens as f64));
    series.extend(limits.map(|limits| Series {
        name: "wire limit".into(),
        points: ends.map(|tokens| (tokens, limits.wire_gb_per_s)).to_vec(),
    }));
    Plot {
        file: format!("{name}-bandwidth.svg"),
        title: format!("{name}: wire bandwidth a GPU, {} GPUs", records[0].ranks),
        unit: "GB/s",
        log_y: false,
        series,
    }
}

fn draw(path: &Path, plot: &Plot) -> Result<(), Box<dyn Error>> {
    let points = || plot.series.iter().flat_map(|series| &series.points);
    let least = |pick: fn(&(f64, f64)) -> f64| points().map(pick).fold(f64::INFINITY, f64::min);
    let most = |pick: fn(&(f64, f64)) -> f64| points().map(pick).fold(0.0, f64::max);
    let first = least(|p| p.0).max(1.0);
    let x = (first..most(|p| p.0).max(first + 1.0) * 1.1).log_scale();
    let mut tokens: Vec<f64> = points().map(|point| point.0).collect();
    tokens.sort_by(f64::total_cmp);
    tokens.dedup();
    let x = x.with_key_points(tokens);
    let top = most(|p| p.1).max(1.0) * 1.2;
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut builder = ChartBuilder::on(&root);
    builder
        .caption(&plot.title, ("sans-serif", 22))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64);
    if plot.log_y {
        let bottom = least(|p| p.1).max(LEAST_TIME) * 0.8;
        let y = (bottom..top).log_scale();
        let y = y.with_key_points(round_numbers(bottom, top));
        fill(&mut builder.build_cartesian_2d(x, y)?, plot)?;
    } else {
        fill(&mut builder.build_cartesian_2d(x, 0.0..top)?, plot)?;
    }
    root.present()?;
    Ok(())
}

/// 1, 2 and 5 times the powers of ten from `bottom` to `top`, or the powers alone where they are many.
fn round_numbers(bottom: f64, top: f64) -> Vec<f64> {
    let decades = bottom.log10().floor() as i32..=top.log10().ceil() as i32;
    let steps: &[f64] = if (top / bottom).log10() < 3.0 {
        &[1.0, 2.0, 5.0]
    } else {
        &[1.0]
    };
    let numbers = decades.flat_map(|power| steps.iter().map(move |step| step * 10_f64.powi(power)));
    numbers
        .filter(|number| (bottom..=top).contains(number))
        .collect()
}

/// A number on an axis: three significant digits of what is below 100, and commas in thousands.
fn label(value: f64) -> String {
    if value < 100.0 {
        let decimals = (2.0 - value.max(1e-6).log10().floor()) as usize;
        let text = format!("{value:.decimals$}");
        return match text.contains('.') {
            true => text.trim_end_matches('0').trim_end_matches('.').into(),
            false => text,
        };
    }
    let digits = format!("{value:.0}");
    let groups = digits.as_bytes().rchunks(3).rev();
    let groups: Vec<_> = groups.map(String::from_utf8_lossy).collect();
    groups.join(",")
}

/// Draws the axes, the lines and the legend.
fn fill<'a, DB, X, Y>(
    chart: &mut ChartContext<'a, DB, Cartesian2d<X, Y>>,
    plot: &Plot,
) -> Result<(), Box<dyn Error>>
where
    DB: DrawingBackend + 'a,
    DB::ErrorType: 'static,
    X: Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
{
    let axis = |value: &f64| label(*value);
    chart
        .configure_mesh()
        .max_light_lines(0)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style(("sans-serif", 13, &INK))
        .x_desc("tokens a rank")
        .y_desc(plot.unit)
        .x_label_formatter(&axis)
        .y_label_formatter(&axis)
        .draw()?;
    for (index, series) in plot.series.iter().enumerate() {
        let style = COLOURS[index % COLOURS.len()].stroke_width(2);
        chart
            .draw_series(LineSeries::new(series.points.clone(), style))?
            .label(&series.name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(TRANSPARENT)
        .position(SeriesLabelPosition::UpperLeft)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::statistics::Summary;

    #[test]
    fn numbers_on_an_axis_keep_their_digits() {
        let labels = [
            0.0, 0.05, 0.1, 0.2, 1.0, 2.5, 10.0, 12.0, 50.0, 500.0, 8192.0, 1e6,
        ]
        .map(label);
        let expected = [
            "0",
            "0.05",
            "0.1",
            "0.2",
            "1",
            "2.5",
            "10",
            "12",
            "50",
            "500",
            "8,192",
            "1,000,000",
        ];
        assert_eq!(labels, expected);
        assert_eq!(round_numbers(0.08, 1.2), [0.1, 0.2, 0.5, 1.0]);
        assert_eq!(round_numbers(0.08, 1200.0), [0.1, 1.0, 10.0, 100.0, 1000.0]);
    }

    /// The texts of a drawing, in the order in which they stand there.
    fn texts(svg: &str) -> Vec<&str> {
        let after = svg.split("<text").skip(1);
        let texts = after.filter_map(|text| text.split_once('>')?.1.split_once('<'));
        texts.map(|(text, _)| text.trim()).collect()
    }

    #[test]
    fn four_plots_are_written() {
        let record = |tokens: usize| Record {
            tokens,
            format: "fp8",
            mode: "reduced",
            dispatch: Phase {
                gpu_us: Summary {
                    median: 10.0 + tokens as f64 * 0.06,
                    ..Summary::default()
                },
                gb_per_s: 200.0,
                floor_us: Some(tokens as f64 * 0.06),
                ..Phase::default()
            },
            ..Record::default()
        };
        let folder = std::env::temp_dir().join(format!("ferry-plots-{}", std::process::id()));
        let limits = Limits {
            wire_gb_per_s: 345.0,
            ..Limits::default()
        };
        plot(
            &folder,
            &[record(1), record(128), record(8192)],
            Some(&limits),
        )
        .unwrap();
        let text = std::fs::read_to_string(folder.join("dispatch-bandwidth.svg")).unwrap();
        assert!(text.contains("wire limit") && text.contains("fp8 reduced"));
        let text = std::fs::read_to_string(folder.join("dispatch-time.svg")).unwrap();
        let labels = texts(&text);
        for label in ["0.1", "1", "10", "100", "128", "8,192"] {
            assert!(labels.contains(&label), "{label} in {labels:?}");
        }
        assert!(!labels.contains(&"0"), "{labels:?}");
        assert!(
            !text.contains(r##"stroke="#000000""##),
            "a black line is left"
        );
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 4);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
