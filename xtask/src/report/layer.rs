//! The chart of a layer of experts: how long tokens travel, and how long the whole layer takes, by stage.

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::Value;

use super::chart::thousands;
use super::svg::Svg;

/// Stages that carry tokens, each with a strong colour of its own.
const CARRYING: [(&str, &str); 7] = [
    ("dispatch", "#0072b2"),
    ("combine", "#d55e00"),
    ("encode", "#56707a"),
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
/// Style of small texts, and width of a letter.
const SMALL: &str = "font-size=\"11\"";
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

#[derive(Clone, Deserialize)]
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
    let mut svg = Svg::new();
    let mut y = 24.0;
    svg.text(8.0, y, &title, "font-size=\"14\"");
    for (title, all) in [
        ("carrying tokens", false),
        ("all stages, each of its slowest rank", true),
    ] {
        y = draw_panel(&mut svg, &layers, y + 30.0, title, all);
    }
    y = draw_legend(&mut svg, &layers, y + 12.0);
    Ok(svg.finish(WIDTH, y, INK))
}

fn read(line: &str) -> Result<Layer> {
    let mut value: Value = serde_json::from_str(line)?;
    let layer = value.get_mut("layer").map(Value::take);
    Ok(serde_json::from_value(layer.unwrap_or(value))?)
}

/// Draws a bar for each layer from `y` on, of `all` stages or of those that carry. Returns where it ends.
fn draw_panel(svg: &mut Svg, layers: &[Layer], y: f64, title: &str, all: bool) -> f64 {
    let shown = |layer: &Layer| -> Vec<Stage> {
        let stages = layer.stages.iter().filter(|stage| all || stage.carries());
        stages.cloned().collect()
    };
    let total = |layer: &Layer| shown(layer).iter().map(|stage| stage.us).sum::<f64>();
    let longest = layers.iter().map(total).fold(1.0, f64::max);
    svg.text(LEFT, y, title, "font-size=\"13\"");
    let mut top = y + 8.0;
    for layer in layers {
        let (label, base) = (
            format!("{}, {}", layer.format, layer.carried_by),
            top + BAR / 2.0 + 4.0,
        );
        svg.text(8.0, base, &label, SMALL);
        let mut x = LEFT;
        for stage in shown(layer) {
            let width = stage.us / longest * LENGTH;
            draw_stage(svg, &stage, [x, top], width);
            x += width;
        }
        svg.text(x + 6.0, base, &thousands(total(layer), 0), SMALL);
        top += BAR + 6.0;
    }
    top
}

/// Draws a part of a bar at x and y, with its name and its time if they fit.
fn draw_stage(svg: &mut Svg, stage: &Stage, at: [f64; 2], width: f64) {
    svg.rect(at, [width, BAR], stage.colour().unwrap_or(INK));
    if (stage.stage.len() as f64) * LETTER > width {
        return;
    }
    let ink = if stage.carries() { "#ffffff" } else { INK };
    let style = format!("fill=\"{ink}\" text-anchor=\"middle\" {SMALL}");
    let (middle, top) = (at[0] + width / 2.0, at[1]);
    svg.text(middle, top + 15.0, &stage.stage, &style);
    svg.text(middle, top + 29.0, &thousands(stage.us, 0), &style);
}

/// Names the colours that were used, those that carry in the first line. Returns where it ends.
fn draw_legend(svg: &mut Svg, layers: &[Layer], y: f64) -> f64 {
    let mut y = y;
    for colours in [&CARRYING[..], &COMMON] {
        let mut x = LEFT;
        for (name, colour) in colours {
            let mut stages = layers.iter().flat_map(|layer| &layer.stages);
            if !stages.any(|stage| stage.stage == *name) {
                continue;
            }
            svg.rect([x, y], [11.0, 11.0], colour);
            svg.text(x + 16.0, y + 10.0, name, SMALL);
            x += 34.0 + name.len() as f64 * LETTER;
        }
        y += 18.0;
    }
    y
}
