//! Says in words what the columns of a shape are.

use crate::chart::Chart;

/// What `column` counts in the shapes of `op`, where it is known.
fn words(op: &str, column: &str) -> Option<&'static str> {
    Some(match (op, column) {
        ("top_k_per_row", "R") => "rows",
        ("top_k_per_row", "C") => "columns of a row",
        ("top_k_per_row", "k") => "entries that are picked of a row",
        ("activation_topk" | "hash_route" | "dense_router", "N") => "tokens",
        ("activation_topk" | "hash_route" | "dense_router", "E") => "experts",
        ("dense_router", "H") => "width of a token",
        ("gated_delta_rule", "HV") => "value heads",
        ("gated_delta_rule", "B") => "sequences",
        ("gated_delta_rule" | "flash_head_argmax", "T") => "tokens",
        ("flash_head_argmax", "V") => "vocabulary",
        ("flash_head_argmax", "D") => "width of a token",
        ("flash_head_argmax", "P") => "clusters probed",
        _ => return None,
    })
}

/// The label of the x axis.
pub(crate) fn axis(chart: &Chart) -> String {
    let column = &chart.x_column;
    match words(&chart.op, column) {
        Some(words) => format!("{column}: {words}"),
        None => column.clone(),
    }
}

/// What the columns are that distinguish panels and lines; empty if that is not known of any.
pub(crate) fn key(chart: &Chart) -> String {
    let shape = chart.panels.iter().flat_map(|panel| panel.cases()).next();
    let columns = shape.iter().flat_map(|case| case.shape.columns());
    let said = columns.filter_map(|(name, _)| Some(format!("{name}: {}", words(&chart.op, name)?)));
    said.collect::<Vec<_>>().join(", ")
}
