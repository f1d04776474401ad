//! The chart of a layer of experts: how long tokens travel, and how long the whole layer takes, by stage.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::Value;

use super::chart::thousands;

/// Stages that carry tokens, each with a strong colour of its own.
const CARRYING: [(&str, &str); 6] = [
    ("dispatch", "#0072b2"),
    ("combine", "#d55e00"),
    ("all-gather", "#00795a"),
    ("sort by expert", "#aa4499"),
    ("sum by token", "#8a6d00"),
    ("reduce-scatter", "#7b3f00"),
];
/// Stages that every layer has, each with a pale colour of its own.
const COMMON: [(&str, &str); 5] = [
    ("router", "#cfe8c6"),
    ("top-k", "#f6e3b4"),
    ("GEMM: gate and up", "#d6e4f2"),
    ("fused SiLU", "#f4cfe0"),
    ("GEMM: down", "#e3dcf3"),
];

const INK: &str = "#3c3c3c";
const WIDTH: f64 = 900.0;
/// Left end of the bars, and length of the longest one.
const LEFT: f64 = 96.0;
const LENGTH: f64 = 740.0;
const BAR: f64 = 36.0;
/// Width of a letter.
const LETTER: f64 = 6.0;

/// A layer that was measured.
#[derive(Deserialize)]
struct Layer {
    carried_by: String,
    format: String,
    ranks: usize,
    tokens: usize,
    hidden: usize,
    top_k: usize,
    experts: usize,
    stages: Vec<Stage>,
}

#[derive(Deserialize)]
struct Stage {
    stage: String,
    us: f64,
}

impl Stage {
    fn carries(&self) -> bool {
        CARRYING.iter().any(|(name, _)| *name == self.stage)
    }

    fn colour(&self) -> Option<&'static str> {
        let mut all = CARRYING.iter().chain(&COMMON);
        let (_, colour) = all.find(|(name, _)| *name == self.stage)?;
        Some(colour)
    }
}

/// Draws the layers with the most tokens of a record, a JSON object a line, as SVG.
pub(super) fn draw(text: &str) -> Result<String> {
    let mut layers = text.lines().map(read).collect::<Result<Vec<_>>>()?;
    let most = layers.iter().map(|layer| layer.tokens).max();
    layers.retain(|layer| Some(layer.tokens) == most);
    let first = layers.first().context("no layer")?;
    let title = format!(
        "A layer of experts on {} GPUs, {} tokens each, hidden {}, top-{} of {}: µs",
        first.ranks,
        thousands(first.tokens as f64, 0),
        thousands(first.hidden as f64, 0),
        first.top_k,
        first.experts
    );
    for layer in &layers {
        let unknown = layer.stages.iter().find(|stage| stage.colour().is_none());
        if let Some(stage) = unknown {
            anyhow::bail!("`{}`: a stage without a colour", stage.stage);
        }
    }
    // A `String` takes every write.
    let mut body = String::new();
    let mut y = 24.0;
    let _ = write_text(&mut body, 8.0, y, &title, "font-size=\"14\"");
    for (title, all) in [
        ("carrying tokens", false),
        ("all stages, each of its slowest rank", true),
    ] {
        y = draw_panel(&mut body, &layers, y + 30.0, title, all);
    }
    y = draw_legend(&mut body, &layers, y + 12.0);
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y}\" \
         font-family=\"sans-serif\" font-size=\"11\" fill=\"{INK}\">\n\
         <rect width=\"{WIDTH}\" height=\"{y}\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    ))
}

fn read(line: &str) -> Result<Layer> {
    let mut value: Value = serde_json::from_str(line)?;
    let layer = value.get_mut("layer").map(Value::take);
    Ok(serde_json::from_value(layer.unwrap_or(value))?)
}

/// Draws a bar for each layer from `y` on, of `all` stages or of those that carry. Returns where it ends.
fn draw_panel(svg: &mut String, layers: &[Layer], y: f64, title: &str, all: bool) -> f64 {
    let shown = |layer: &Layer| -> Vec<(f64, usize)> {
        let stages = layer.stages.iter().enumerate();
        let shown = stages.filter(|(_, stage)| all || stage.carries());
        shown.map(|(index, stage)| (stage.us, index)).collect()
    };
    let total = |layer: &Layer| shown(layer).iter().map(|(us, _)| us).sum::<f64>();
    let longest = layers.iter().map(total).fold(1.0, f64::max);
    let _ = write_text(svg, LEFT, y, title, "font-size=\"13\"");
    let mut top = y + 8.0;
    for layer in layers {
        let label = format!("{}, {}", layer.format, layer.carried_by);
        let _ = write_text(svg, 8.0, top + BAR / 2.0 + 4.0, &label, "");
        let mut x = LEFT;
        for (us, index) in shown(layer) {
            let width = us / longest * LENGTH;
            let _ = draw_stage(svg, &layer.stages[index], Place { x, top, width });
            x += width;
        }
        let sum = thousands(total(layer), 0);
        let _ = write_text(svg, x + 6.0, top + BAR / 2.0 + 4.0, &sum, "");
        top += BAR + 6.0;
    }
    top
}

/// Place of a stage in a bar.
struct Place {
    x: f64,
    top: f64,
    width: f64,
}

/// Draws a part of a bar, with its name and its time if they fit.
fn draw_stage(svg: &mut String, stage: &Stage, place: Place) -> std::fmt::Result {
    let Place { x, top, width } = place;
    let colour = stage.colour().unwrap_or(INK);
    writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{colour}\"/>"
    )?;
    if (stage.stage.len() as f64) * LETTER > width {
        return Ok(());
    }
    let ink = if stage.carries() { "#ffffff" } else { INK };
    let style = format!("fill=\"{ink}\" text-anchor=\"middle\"");
    let middle = x + width / 2.0;
    write_text(svg, middle, top + 15.0, &stage.stage, &style)?;
    write_text(svg, middle, top + 29.0, &thousands(stage.us, 0), &style)
}

/// Names the colours that were used, those that carry in the first line. Returns where it ends.
fn draw_legend(svg: &mut String, layers: &[Layer], y: f64) -> f64 {
    let mut y = y;
    for colours in [&CARRYING[..], &COMMON] {
        let mut x = LEFT;
        for (name, colour) in colours {
            let stages = || layers.iter().flat_map(|layer| &layer.stages);
            if !stages().any(|stage| stage.stage == *name) {
                continue;
            }
            let square =
                format!("<rect x=\"{x}\" y=\"{y}\" width=\"11\" height=\"11\" fill=\"{colour}\"/>");
            let _ = writeln!(svg, "{square}");
            let _ = write_text(svg, x + 16.0, y + 10.0, name, "");
            x += 34.0 + name.len() as f64 * LETTER;
        }
        y += 18.0;
    }
    y
}

fn write_text(svg: &mut String, x: f64, y: f64, text: &str, style: &str) -> std::fmt::Result {
    writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" {style}>{text}</text>")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(carried_by: &str, stages: &[(&str, f64)]) -> String {
        let stage = |(stage, us): &(&str, f64)| serde_json::json!({ "stage": stage, "us": us });
        let stages: Vec<_> = stages.iter().map(stage).collect();
        let layer = serde_json::json!({
            "carried_by": carried_by, "format": "FP8", "ranks": 2, "tokens": 4096, "hidden": 7168,
            "top_k": 8, "experts": 256, "stages": stages,
        });
        serde_json::json!({ "layer": layer }).to_string()
    }

    #[test]
    fn stages_that_carry_have_a_panel_of_their_own() {
        let gemm = ("GEMM: gate and up", 3000.0);
        let text = [
            line("Ferry", &[("dispatch", 200.0), gemm]),
            line(
                "NCCL",
                &[("all-gather", 300.0), gemm, ("reduce-scatter", 100.0)],
            ),
        ];
        let svg = draw(&text.join("\n")).unwrap();
        let count = |part: &str| svg.matches(part).count();
        assert_eq!(
            count("fill=\"#0072b2\""),
            3,
            "two bars and the legend: {svg}"
        );
        assert_eq!(count("fill=\"#d6e4f2\""), 3, "{svg}");
        assert_eq!(
            count(">400</text>"),
            1,
            "NCCL's sum of the first panel: {svg}"
        );
        assert_eq!(count(">3,400</text>"), 1, "{svg}");
        assert!(!svg.contains("NaN"), "{svg}");
        let error = draw(&line("Ferry", &[("nap", 1.0)])).unwrap_err();
        assert_eq!(error.to_string(), "`nap`: a stage without a colour");
    }
}
