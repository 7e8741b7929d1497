use plotters::coord::combinators::{BindKeyPoints, IntoLogRange};
use plotters::prelude::*;

use super::Recall;
use crate::error::Error;
use crate::style::{
    DASH, FLOOR, GRID, HEADER, OURS, PANEL, PEER, TEXT, WIDTH, mark, text, with_dark_mode,
};
use crate::svg::{Area, draw_legend, failed};

/// Draws the shares over the number of probes; the title names `model`.
///
/// # Errors
/// Only if the SVG backend fails.
pub fn draw(recall: &Recall, model: &str) -> Result<String, Error> {
    let mut drawing = String::new();
    let root = SVGBackend::with_string(&mut drawing, (WIDTH, HEADER + PANEL)).into_drawing_area();
    // Without a background, black text would vanish on a dark page.
    root.fill(&WHITE).map_err(failed)?;
    let (header, body) = root.split_vertically(HEADER);
    draw_header(&header, recall, model)?;
    draw_curves(&body, recall)?;
    root.present().map_err(failed)?;
    // They borrow the string.
    drop((root, header, body));
    Ok(with_dark_mode(&drawing))
}

fn draw_header(area: &Area, recall: &Recall, model: &str) -> Result<(), Error> {
    let title = format!("Clustered output head of {model}");
    let subtitle = format!(
        "higher is better; {} clusters of {} tokens, {} positions",
        recall.clusters, recall.capacity, recall.positions
    );
    area.draw_text(&title, &text(20.0), (16, 12))
        .map_err(failed)?;
    area.draw_text(&subtitle, &text(14.0), (16, 42))
        .map_err(failed)?;
    let mut legend = vec![("recall@1", OURS, false)];
    if recall.dense_acceptance.is_some() {
        legend.push(("acceptance of its drafts", PEER, false));
        legend.push(("acceptance of the dense head's drafts", FLOOR, true));
    }
    draw_legend(area, &legend, 80)
}

fn draw_curves(area: &Area, recall: &Recall) -> Result<(), Error> {
    let xs: Vec<f64> = recall.probes.iter().map(|p| p.probes as f64).collect();
    let (first, last) = (xs[0], xs[xs.len() - 1]);
    // A margin for the marks at both ends, also where both are one.
    let margin = (last / first).powf(0.05).max(1.1);
    let mut context = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(46)
        .y_label_area_size(58)
        .build_cartesian_2d(
            (first / margin..last * margin)
                .log_scale()
                .with_key_points(xs),
            // Leaves space for the marks at 100 %.
            0.0..104.0,
        )
        .map_err(failed)?;
    context
        .configure_mesh()
        .axis_style(TEXT)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .label_style(text(13.0))
        .axis_desc_style(text(14.0))
        .x_desc("clusters probed")
        .y_desc("percent")
        .y_labels(6)
        .x_label_formatter(&|probes: &f64| format!("{probes:.0}"))
        .y_label_formatter(&|share: &f64| format!("{share:.0}"))
        .draw()
        .map_err(failed)?;

    if let Some(dense) = recall.dense_acceptance {
        let ends = [first, last].map(|x| (x, 100.0 * dense));
        let dashes = DashedLineSeries::new(ends, DASH.0, DASH.1, FLOOR.stroke_width(2));
        context.draw_series(dashes).map_err(failed)?;
    }
    let points = |share: fn(&super::Probe) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = recall.probes.iter();
        let points = points.filter_map(|probe| Some((probe.probes as f64, 100.0 * share(probe)?)));
        points.collect()
    };
    for (line, (color, points)) in [
        (PEER, points(|probe| probe.acceptance)),
        (OURS, points(|probe| Some(probe.recall))),
    ]
    .into_iter()
    .enumerate()
    {
        context
            .draw_series(LineSeries::new(points.clone(), color.stroke_width(2)))
            .map_err(failed)?;
        let marks = points
            .into_iter()
            .map(|at| EmptyElement::at(at) + Polygon::new(mark(line).to_vec(), color.filled()));
        context.draw_series(marks).map_err(failed)?;
    }
    Ok(())
}
