//! Sizes, colours and marks.

use plotters::style::{FontFamily, IntoTextStyle, RGBColor, TextStyle};

/// Width of the drawing. A README shows it at about this width, so that text keeps its size.
pub const WIDTH: u32 = 920;
/// Height of title, subtitle and legend.
pub const HEADER: u32 = 104;
/// Height of a row of panels.
pub const PANEL: u32 = 330;

// From Okabe and Ito's palette: readers with any of the common colour deficiencies can tell the
// colours apart, and so can readers of a grey print, by lightness.
/// Our times.
pub const OURS: RGBColor = RGBColor(0, 114, 178);
/// The best peer's.
pub const PEER: RGBColor = RGBColor(230, 159, 0);
/// The floor.
pub const FLOOR: RGBColor = RGBColor(90, 90, 90);
/// Grid lines.
pub const GRID: RGBColor = RGBColor(225, 225, 225);

/// Text and axes.
pub const TEXT: RGBColor = RGBColor(40, 40, 40);

/// Dashes of the floor and the gaps between them, in pixels.
pub const DASH: (i32, i32) = (6, 4);

/// Text of `pixels` height. The SVG backend divides the size it is given by 1.24.
pub fn text(pixels: f64) -> TextStyle<'static> {
    (FontFamily::SansSerif, pixels * 1.24)
        .into_text_style(&(1, 1))
        .color(&TEXT)
}

/// Width of a legend entry. The backend has no font metrics, so this is the average of a wide sans
/// serif.
pub fn text_width(text: &str) -> i32 {
    text.chars().count() as i32 * 15 / 2
}

/// The outline of the mark of a panel's `line`-th line around its point, in pixels.
pub fn mark(line: usize) -> &'static [(i32, i32)] {
    const MARKS: [&[(i32, i32)]; 5] = [
        &[
            (-2, -4),
            (2, -4),
            (4, -2),
            (4, 2),
            (2, 4),
            (-2, 4),
            (-4, 2),
            (-4, -2),
        ],
        &[(0, -6), (5, 4), (-5, 4)],
        &[(-4, -4), (4, -4), (4, 4), (-4, 4)],
        &[(0, -6), (6, 0), (0, 6), (-6, 0)],
        &[(0, 6), (-5, -4), (5, -4)],
    ];
    MARKS[line % MARKS.len()]
}
