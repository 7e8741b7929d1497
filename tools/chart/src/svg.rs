//! Draws the chart as an SVG.

use std::fmt::Display;

use plotters::coord::Shift;
use plotters::coord::combinators::{BindKeyPoints, IntoLogRange};
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::chart::{Case, Chart, Panel};
use crate::error::Error;
use crate::sizes;
use crate::style::{
    DASH, EDGE, FLOOR, GRID, HEADER, OURS, PANEL, PEER, ROW, TEXT, WIDTH, mark, text, text_width,
    with_dark_mode,
};

pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

pub(crate) fn failed(error: impl Display) -> Error {
    Error::Draw(error.to_string())
}

/// Draws `chart`, whose title names `device`.
///
/// # Errors
/// Only if the SVG backend fails.
pub fn draw(chart: &Chart, device: &str) -> Result<String, Error> {
    let count = chart.panels.len();
    let per_row = match count {
        0..=3 => count.max(1),
        4 => 2,
        _ => 3,
    };
    let rows = count.div_ceil(per_row);
    let key = sizes::key(chart);
    let lines = line_legend(chart);
    let line_rows = lines.iter().map(|entry| entry.row + 1).max().unwrap_or(0);
    let height = HEADER + ROW * (u32::from(!key.is_empty()) + line_rows);

    let mut drawing = String::new();
    let root = SVGBackend::with_string(&mut drawing, (WIDTH, height + PANEL * rows as u32))
        .into_drawing_area();
    // Without a background, black text would vanish on a dark page.
    root.fill(&WHITE).map_err(failed)?;
    let (header, body) = root.split_vertically(height);
    draw_header(&header, chart, device, &key)?;
    draw_line_legend(&header, &lines, (height - ROW * line_rows) as i32)?;
    for (panel, area) in chart.panels.iter().zip(body.split_evenly((rows, per_row))) {
        draw_panel(&area, panel, chart)?;
    }
    root.present().map_err(failed)?;
    // They borrow the string.
    drop((root, header, body));
    Ok(with_dark_mode(&drawing))
}

/// Draws a legend of lines by colour.
pub(crate) fn draw_legend(
    area: &Area,
    legend: &[(&str, RGBColor, bool)],
    y: i32,
) -> Result<(), Error> {
    let mut x = EDGE;
    let left = text(14.0).pos(Pos::new(HPos::Left, VPos::Center));
    for &(name, color, dashed) in legend {
        let ends = [(x, y), (x + 30, y)];
        match dashed {
            true => area.draw(&DashedPathElement::new(
                ends,
                DASH.0,
                DASH.1,
                color.stroke_width(2),
            )),
            false => area.draw(&PathElement::new(ends, color.stroke_width(3))),
        }
        .map_err(failed)?;
        area.draw_text(name, &left, (x + 38, y)).map_err(failed)?;
        x += 38 + text_width(name) + 26;
    }
    Ok(())
}

fn draw_header(area: &Area, chart: &Chart, device: &str, key: &str) -> Result<(), Error> {
    let mut title = format!("{} on {device}, {}", chart.op, chart.dtype);
    if let Some(codegen) = &chart.codegen {
        title += &match codegen.as_str() {
            "cpp" => ", compiled as CUDA C++".to_owned(),
            "llvm" => ", compiled by LLVM".to_owned(),
            other => format!(", through {other}"),
        };
    }
    let subtitle = "lower is better; cold inputs, CUDA graph replay";
    area.draw_text(&title, &text(20.0), (EDGE, 12))
        .map_err(failed)?;
    area.draw_text(subtitle, &text(14.0), (EDGE, 42))
        .map_err(failed)?;
    let mut y = 80;
    if !key.is_empty() {
        area.draw_text(key, &text(14.0), (EDGE, 64))
            .map_err(failed)?;
        y += ROW as i32;
    }
    let legend = [
        ("ours", OURS, false),
        ("best peer", PEER, false),
        ("floor: bytes to move / copy rate", FLOOR, true),
    ];
    draw_legend(area, &legend, y)
}

/// The mark of a line, and the size that it stands for.
struct LineEntry {
    name: String,
    x: i32,
    row: u32,
}

/// The legend of the lines of a panel, in rows that end before the right edge.
fn line_legend(chart: &Chart) -> Vec<LineEntry> {
    let Some(column) = &chart.line_column else {
        return Vec::new();
    };
    let (mut x, mut row) = (EDGE, 0);
    let entry = |value| {
        let name = format!("{column} = {value}");
        let width = 12 + text_width(&name);
        if x > EDGE && x + width > WIDTH as i32 - EDGE {
            (x, row) = (EDGE, row + 1);
        }
        let entry = LineEntry { name, x, row };
        x += width + 20;
        entry
    };
    chart.line_values().into_iter().map(entry).collect()
}

fn draw_line_legend(area: &Area, lines: &[LineEntry], top: i32) -> Result<(), Error> {
    let left = text(14.0).pos(Pos::new(HPos::Left, VPos::Center));
    for (i, LineEntry { name, x, row }) in lines.iter().enumerate() {
        // The outline of a mark begins six pixels before its centre.
        let (x, y) = (x + 6, top + (row * ROW) as i32);
        let outline: Vec<_> = mark(i).iter().map(|(dx, dy)| (x + dx, y + dy)).collect();
        area.draw(&Polygon::new(outline, TEXT.filled()))
            .map_err(failed)?;
        area.draw_text(name, &left, (x + 12, y)).map_err(failed)?;
    }
    Ok(())
}

fn draw_panel(area: &Area, panel: &Panel, chart: &Chart) -> Result<(), Error> {
    let xs = x_values(panel);
    let (first, last) = (
        xs.first().copied().unwrap_or(1) as f64,
        xs.last().copied().unwrap_or(1) as f64,
    );
    // A margin for the marks at both ends, also where both are one.
    let margin = (last / first).powf(0.05).max(1.1);
    let (ticks, low, high) = y_ticks(panel);

    let shown = label_subset(&xs, (f64::from(area.dim_in_pixel().0) - 90.0).max(1.0));
    let x_label = |x: &f64| {
        if shown.contains(&(x.round() as u64)) {
            format!("{x:.0}")
        } else {
            String::new()
        }
    };
    let mut context = ChartBuilder::on(area)
        .margin(12)
        .caption(
            if panel.title.is_empty() {
                " "
            } else {
                &panel.title
            },
            text(15.0),
        )
        .x_label_area_size(46)
        .y_label_area_size(58)
        .build_cartesian_2d(
            (first / margin..last * margin)
                .log_scale()
                .with_key_points(xs.iter().map(|&x| x as f64).collect()),
            (low..high).log_scale().with_key_points(ticks),
        )
        .map_err(failed)?;
    context
        .configure_mesh()
        .axis_style(TEXT)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .label_style(text(13.0))
        .axis_desc_style(text(14.0))
        .x_desc(sizes::axis(chart))
        .y_desc("microseconds")
        .x_label_formatter(&x_label)
        .y_label_formatter(&|us: &f64| us.to_string())
        .draw()
        .map_err(failed)?;

    let values = chart.line_values();
    let mut floors: Vec<Vec<(f64, f64)>> = Vec::new();
    for line in &panel.lines {
        let floor = points(&line.points, Case::floor);
        // A floor that does not depend on the column of the lines would be drawn once for each of
        // them.
        if !floors.contains(&floor) {
            let dashes =
                DashedLineSeries::new(floor.iter().copied(), DASH.0, DASH.1, FLOOR.stroke_width(2));
            context.draw_series(dashes).map_err(failed)?;
            floors.push(floor);
        }
    }
    for line in &panel.lines {
        let outline = mark(
            values
                .iter()
                .position(|value| Some(*value) == line.value)
                .unwrap_or(0),
        );
        // Ours last, on top.
        for (color, points) in [
            (
                PEER,
                points(&line.points, |case| case.peer.as_ref().map(|peer| peer.us)),
            ),
            (OURS, points(&line.points, |case| case.ours)),
        ] {
            context
                .draw_series(LineSeries::new(points.clone(), color.stroke_width(2)))
                .map_err(failed)?;
            let marks = points
                .into_iter()
                .map(|at| EmptyElement::at(at) + Polygon::new(outline.to_vec(), color.filled()));
            context.draw_series(marks).map_err(failed)?;
        }
    }
    Ok(())
}

/// The points of one series. A logarithmic axis cannot show zero, which stands for a floor rounded
/// down.
fn points(line: &[(u64, Case)], value: impl Fn(&Case) -> Option<f64>) -> Vec<(f64, f64)> {
    let points = line
        .iter()
        .filter_map(|(x, case)| Some((*x as f64, value(case)?)));
    points.filter(|(_, us)| *us > 0.0).collect()
}

fn x_values(panel: &Panel) -> Vec<u64> {
    let mut xs: Vec<u64> = panel
        .lines
        .iter()
        .flat_map(|line| &line.points)
        .map(|(x, _)| *x)
        .collect();
    xs.sort_unstable();
    xs.dedup();
    xs
}

/// The values of `xs` whose labels fit next to each other on `width` pixels, from the largest down.
fn label_subset(xs: &[u64], width: f64) -> Vec<u64> {
    let span = (*xs.last().unwrap_or(&1) as f64 / *xs.first().unwrap_or(&1) as f64)
        .ln()
        .max(f64::MIN_POSITIVE);
    let half = |x: u64| x.to_string().len() as f64 * 4.0 + 2.0;
    let mut free = f64::INFINITY;
    let mut shown = Vec::new();
    for &x in xs.iter().rev() {
        let at = (x as f64 / xs[0] as f64).ln() / span * width;
        if at + half(x) <= free {
            free = at - half(x);
            shown.push(x);
        }
    }
    shown
}

/// Ticks at 1, 2 and 5 times powers of ten around all times of the panel, and the range of the
/// axis.
fn y_ticks(panel: &Panel) -> (Vec<f64>, f64, f64) {
    let times = panel.cases().flat_map(|case| {
        [
            case.ours,
            case.peer.as_ref().map(|peer| peer.us),
            case.floor(),
        ]
    });
    let times: Vec<f64> = times.flatten().filter(|us| *us > 0.0).collect();
    let low = times.iter().copied().reduce(f64::min).unwrap_or(1.0);
    let high = times.iter().copied().reduce(f64::max).unwrap_or(10.0);
    // Written as decimals, so that a tick is exactly the number in its label.
    let steps: Vec<f64> = (-4..8)
        .flat_map(|e| [1, 2, 5].map(|m| format!("{m}e{e}").parse().unwrap_or(1.0)))
        .collect();
    let start = steps.iter().rposition(|step| *step < low).unwrap_or(0);
    let end = steps
        .iter()
        .position(|step| *step > high)
        .unwrap_or(steps.len() - 1);
    (steps[start..=end].to_vec(), steps[start], steps[end])
}
