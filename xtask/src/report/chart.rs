//! The chart: time and share of the limit against tokens, for each number of GPUs.

use super::records::{Gpus, Phase, RANKS, Results, Round, TOKENS};
use super::svg::Svg;

/// Colours of the numbers of GPUs.
const COLOURS: [&str; RANKS.len()] = ["#0072b2", "#d55e00", "#009e73"];
const SHAPE: &str =
    "hidden 7,168, top-8 of 256 experts, uniform routing, kernels compiled for the shape";
const FORMAT: &str = "fp8";
const INK: &str = "#5a5a5a";
const GRID: &str = "#e8e8e8";

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 396.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 330.0;
const PANEL_WIDTH: f64 = 370.0;

/// The labels of the logarithmic axis of times, in microseconds.
const TIMES: [f64; 8] = [5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
/// The labels of the axis of shares.
const SHARES: [f64; 6] = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0];

/// Half of the chart.
struct Panel {
    left: f64,
    title: &'static str,
    value: fn(&Phase) -> Option<f64>,
    /// Value of NCCL's all-gather.
    nccl: fn(&Round) -> Option<f64>,
    /// Height of a value, from 0 at the bottom to 1 at the top.
    height: fn(f64) -> f64,
    labels: &'static [f64],
    label: fn(f64) -> String,
}

const PANELS: [Panel; 2] = [
    Panel {
        left: 60.0,
        title: "FP8 dispatch, BF16 combine: time, µs",
        value: |phase| Some(phase.us),
        nccl: |round| round.dispatch.nccl_us,
        height: |us| (us / TIMES[0]).ln() / (2.0 * TIMES[7] / TIMES[0]).ln(),
        labels: &TIMES,
        label: |us| thousands(us, 0),
    },
    Panel {
        left: 510.0,
        title: "share of the limit",
        value: Phase::share,
        nccl: |_| None,
        height: |share| share,
        labels: &SHARES,
        label: |share| format!("{:.0} %", 100.0 * share),
    },
];

const NCCL_DASHES: &str = " stroke-dasharray=\"1 4\"";

type Pick = fn(&Round) -> &Phase;

/// Dispatch with a full line, combine with a dashed one.
const CALLS: [(&str, &str, Pick); 2] = [
    ("dispatch", "", |round| &round.dispatch),
    ("combine", " stroke-dasharray=\"6 4\"", |round| {
        &round.combine
    }),
];

/// Draws it as SVG.
pub(super) fn draw(results: &Results) -> String {
    let mut svg = Svg::new();
    for panel in &PANELS {
        draw_panel(&mut svg, panel, results);
    }
    draw_legend(&mut svg, results);
    svg.text(PANELS[0].left, 22.0, SHAPE, "font-size=\"14\"");
    svg.finish(WIDTH, HEIGHT, INK)
}

fn draw_panel(svg: &mut Svg, panel: &Panel, results: &Results) {
    let left = panel.left;
    let y = |value: f64| BOTTOM - (panel.height)(value).clamp(0.0, 1.0) * (BOTTOM - TOP);
    svg.text(left, 46.0, panel.title, "font-size=\"14\"");
    for &value in panel.labels {
        let (height, label) = (y(value), (panel.label)(value));
        let ends = [left, left + PANEL_WIDTH].map(|x| [x, height]);
        svg.line(&ends, &format!("stroke=\"{GRID}\""));
        svg.text(left - 8.0, height + 4.0, &label, "text-anchor=\"end\"");
    }
    for tokens in TOKENS {
        let label = thousands(tokens as f64, 0);
        svg.text(
            x(left, tokens),
            BOTTOM + 18.0,
            &label,
            "text-anchor=\"middle\"",
        );
    }
    for (ranks, colour) in RANKS.into_iter().zip(COLOURS) {
        for (_, dashes, pick) in CALLS {
            let points = TOKENS.into_iter().filter_map(|tokens| {
                let round = results.round(Gpus::own(ranks), FORMAT, tokens, None)?;
                Some([x(left, tokens), y((panel.value)(pick(round))?)])
            });
            svg.line(&points.collect::<Vec<_>>(), &stroke(colour, dashes));
        }
        let points = TOKENS.into_iter().filter_map(|tokens| {
            let round = results.round(Gpus::own(ranks), FORMAT, tokens, None)?;
            Some([x(left, tokens), y((panel.nccl)(round)?)])
        });
        svg.line(&points.collect::<Vec<_>>(), &stroke(colour, NCCL_DASHES));
    }
}

/// Style of a call's line.
fn stroke(colour: &str, dashes: &str) -> String {
    format!("stroke=\"{colour}\" stroke-width=\"2\"{dashes}")
}

/// Colours are numbers of GPUs, dashes are calls.
fn draw_legend(svg: &mut Svg, results: &Results) {
    let base = HEIGHT - 8.0;
    let mut left = 20.0;
    let mut entry = |svg: &mut Svg, text: &str, style: String| {
        let ends = [left, left + 26.0].map(|x| [x, base - 4.0]);
        svg.line(&ends, &style);
        svg.text(left + 30.0, base, text, "");
        left += 44.0 + 7.0 * text.len() as f64;
    };
    for (ranks, colour) in RANKS.into_iter().zip(COLOURS) {
        if let Some(source) = results.sources.get(&Gpus::own(ranks)) {
            entry(svg, &source.hardware, stroke(colour, ""));
        }
    }
    let calls = CALLS.map(|(name, dashes, _)| (name, dashes));
    for (name, dashes) in calls
        .into_iter()
        .chain([("NCCL all-gather, BF16", NCCL_DASHES)])
    {
        entry(svg, name, stroke(INK, dashes));
    }
    let right = PANELS[1].left + PANEL_WIDTH;
    svg.text(right, BOTTOM + 32.0, "tokens a rank", "text-anchor=\"end\"");
}

/// Tokens on a logarithmic axis.
fn x(left: f64, tokens: usize) -> f64 {
    let most = TOKENS[TOKENS.len() - 1] as f64;
    left + 10.0 + (tokens as f64).ln() / most.ln() * (PANEL_WIDTH - 20.0)
}

/// A number with commas in thousands.
pub(super) fn thousands(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    let (whole, fraction) = match text.find('.') {
        Some(point) => text.split_at(point),
        None => (text.as_str(), ""),
    };
    let groups = whole.as_bytes().rchunks(3).rev();
    let groups: Vec<_> = groups.map(String::from_utf8_lossy).collect();
    groups.join(",") + fraction
}
