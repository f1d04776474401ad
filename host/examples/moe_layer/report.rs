//! The table, its JSON, and the chart.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;
use serde_json::json;

use crate::layer::reference::{self, Sample};
use crate::layer::{Format, Job, Outcome, Shape, Way};

/// A layer's figures.
pub struct Record {
    shape: Shape,
    format: Format,
    way: Way,
    iterations: usize,
    /// Names and microseconds.
    stages: Vec<(&'static str, f64)>,
    total: f64,
    samples: usize,
    error: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

impl Record {
    /// Medians over the steps, of the slowest rank in each; and the comparison.
    pub fn new(job: &Job<'_>, outcomes: &[Outcome]) -> Self {
        let slowest = |of: &dyn Fn(&[f32]) -> f32| {
            let of_step = |step: usize| {
                let ranks = outcomes.iter().map(|rank| of(&rank.times[step]));
                f64::from(ranks.fold(0.0, f32::max)) * 1e3
            };
            median((0..job.iterations).map(of_step).collect())
        };
        let stages = job.stages().iter().enumerate();
        let samples: Vec<Sample> = outcomes
            .iter()
            .flat_map(|rank| rank.samples.clone())
            .collect();
        Self {
            shape: job.shape,
            format: job.format,
            way: job.way,
            iterations: job.iterations,
            stages: stages
                .map(|(index, &name)| (name, slowest(&|stages| stages[index])))
                .collect(),
            total: slowest(&|stages| stages.iter().sum()),
            error: reference::worst(&job.tiles, &job.shape, job.format, &samples),
            samples: samples.len(),
        }
    }

    /// Whether the results are as near as they must be. Not if one is NaN.
    pub fn passes(&self) -> bool {
        self.error <= self.format.bar()
    }

    pub fn print(&self) {
        let (format, way) = (self.format.name(), self.way.name());
        println!(
            "\n{format} rows, carried by {way}; experts: {}",
            self.format.gemm()
        );
        println!("  {:<24} {:>10}", "stage", "us");
        for (name, time) in &self.stages {
            println!("  {name:<24} {time:>10.1}");
        }
        println!("  {:<24} {:>10.1}", "layer", self.total);
        println!(
            "  (medians of {} steps, of the slowest rank of each)",
            self.iterations
        );
        let verdict = if self.passes() { "passes" } else { "FAILS" };
        println!(
            "  |y - f64| / |f64|, worst of {} tokens: {:.2e}, bar {:.2e}: {verdict}",
            self.samples,
            self.error,
            self.format.bar()
        );
    }

    fn json(&self) -> serde_json::Value {
        let shape = self.shape;
        let stages: Vec<_> = self
            .stages
            .iter()
            .map(|(name, us)| json!({ "stage": name, "us": us }))
            .collect();
        json!({
            "carried_by": self.way.name(), "format": self.format.name(),
            "experts_multiply": self.format.gemm(),
            "ranks": shape.ranks, "tokens": shape.tokens, "hidden": shape.hidden,
            "intermediate": shape.intermediate, "experts": shape.experts, "top_k": shape.top_k,
            "iterations": self.iterations, "stages": stages, "layer_us": self.total,
            "samples": self.samples, "error": self.error, "bar": self.format.bar(), "passes": self.passes(),
        })
    }
}

/// Writes a line for each.
pub fn write_json(path: &Path, records: &[Record]) -> Result<()> {
    let mut lines = String::new();
    for record in records {
        writeln!(lines, "{}", record.json())?;
    }
    fs::write(path, lines).with_context(|| path.display().to_string())
}

/// A bar of the chart, and the names of its parts.
const BAR: i32 = 34;
const LEFT: i32 = 120;
const WIDTH: i32 = 960;
const LINE: i32 = 20;
const COLOURS: [RGBColor; 10] = [
    RGBColor(153, 153, 153),
    RGBColor(200, 200, 200),
    RGBColor(0, 114, 178),
    RGBColor(240, 228, 66),
    RGBColor(0, 158, 115),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
    RGBColor(0, 60, 100),
];

/// Draws a bar for each, its stages side by side, from `path`'s top down.
pub fn draw(path: &Path, records: &[Record]) -> Result<()> {
    draw_to(path, records).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn draw_to(path: &Path, records: &[Record]) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in records.iter().flat_map(|record| &record.stages) {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let colour = |name: &str| {
        let index = names.iter().position(|other| *other == name);
        COLOURS[index.unwrap_or(0) % COLOURS.len()]
    };
    let bars = records.len() as i32 * (BAR + LINE);
    let height = 60 + bars + names.len() as i32 * LINE;
    let root =
        SVGBackend::new(path, ((LEFT + WIDTH + 120) as u32, height as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let text =
        |words: String, x: i32, y: i32| Text::new(words, (x, y), ("sans-serif", 14).into_font());
    let slowest = records
        .iter()
        .map(|record| record.total)
        .fold(1.0, f64::max);
    let mut y = 30;
    root.draw(&text(
        "Microseconds of a mixture-of-experts layer, by stage".to_owned(),
        LEFT,
        6,
    ))?;
    for record in records {
        let label = format!("{} {}", record.way.name(), record.format.name());
        root.draw(&text(label, 8, y + BAR / 3))?;
        let mut x = 0.0;
        for (name, time) in &record.stages {
            let [from, to] =
                [x, x + time].map(|us| LEFT + (us / slowest * f64::from(WIDTH)) as i32);
            root.draw(&Rectangle::new(
                [(from, y), (to, y + BAR)],
                colour(name).filled(),
            ))?;
            x += time;
        }
        let end = LEFT + (x / slowest * f64::from(WIDTH)) as i32;
        root.draw(&text(format!("{:.0}", record.total), end + 6, y + BAR / 3))?;
        y += BAR + LINE;
    }
    for name in &names {
        root.draw(&Rectangle::new(
            [(LEFT, y), (LEFT + 14, y + 14)],
            colour(name).filled(),
        ))?;
        root.draw(&text((*name).to_owned(), LEFT + 22, y))?;
        y += LINE;
    }
    Ok(root.present()?)
}
