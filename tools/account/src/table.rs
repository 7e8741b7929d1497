//! Prints the account as a Markdown table.

use std::fmt::Write;

use crate::account::Line;

/// What the figures are relative to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// The rate of a plain copy, in TB/s.
    pub copy_rate: f64,
    /// The number of layers that times, bytes and launches are divided by.
    pub layers: usize,
}

/// Makes a table with a row for each line and one for all of them, and the time that the memory
/// needs for the bytes that they moved.
pub fn markdown(lines: &[Line], scale: Scale) -> String {
    let mut table = String::from(
        "| kernel | launches | us | MB | share of the copy rate |\n|---|---|---|---|---|\n",
    );
    let total = Line::total(lines);
    for line in lines.iter().chain([&total]) {
        row(&mut table, line, scale);
    }
    let layers = scale.layers as f64;
    let (floor, us) = (floor(&total, scale) / layers, total.us / layers);
    let each = match scale.layers {
        1 => String::new(),
        layers => format!(", divided by {layers} layers"),
    };
    // Writing to a string cannot fail.
    let _ = writeln!(
        table,
        "\nFloor, the bytes at {} TB/s: {floor:.1} us; the launches take {:.2} times that{each}.",
        scale.copy_rate,
        us / floor
    );
    table
}

fn row(table: &mut String, line: &Line, scale: Scale) {
    let layers = scale.layers as f64;
    let launches = match scale.layers {
        1 => line.launches.to_string(),
        _ => format!("{:.1}", line.launches as f64 / layers),
    };
    let _ = writeln!(
        table,
        "| {} | {launches} | {:.1} | {:.2} | {:.0} % |",
        line.kernel.replace('|', "\\|"),
        line.us / layers,
        line.bytes / layers / 1e6,
        100.0 * floor(line, scale) / line.us.max(f64::MIN_POSITIVE)
    );
}

/// Microseconds that the memory needs.
fn floor(line: &Line, scale: Scale) -> f64 {
    line.bytes / scale.copy_rate / 1e6
}
