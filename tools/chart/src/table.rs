//! Prints the table that belongs to a chart.

use std::fmt::Write;

use crate::chart::{Case, Chart};

/// A Markdown table with a row for each case, in the order of the panels and lines.
pub fn markdown(chart: &Chart) -> String {
    let first = chart.panels.first().map(|panel| &panel.variant);
    let several = chart
        .panels
        .iter()
        .any(|panel| Some(&panel.variant) != first);
    let mut table = String::from(
        "| shape | ours us | best peer us (which) | ratio | floor us | share of copy |\n\
         |---|---|---|---|---|---|\n",
    );
    for panel in &chart.panels {
        for case in panel.cases() {
            let variant = match several {
                true => format!("{} ", panel.variant),
                false => String::new(),
            };
            // Writing to a string cannot fail.
            let _ = writeln!(table, "| {variant}{} | {} |", case.shape, cells(case));
        }
    }
    table
}

fn cells(case: &Case) -> String {
    let peer = case
        .peer
        .as_ref()
        .map(|peer| format!("{:.1} ({})", peer.us, peer.peer.replace('|', "\\|")));
    let cells = [
        case.ours.map(|us| format!("{us:.1}")),
        peer,
        case.ratio().map(|ratio| format!("{ratio:.2}")),
        case.floor().map(|us| format!("{us:.1}")),
        case.share_of_copy
            .map(|share| format!("{:.0} %", share * 100.0)),
    ];
    cells
        .map(|cell| cell.unwrap_or_else(|| "–".into()))
        .join(" | ")
}
