//! Sizes, colours and marks.

use plotters::style::{FontFamily, IntoTextStyle, RGBColor, TextStyle, WHITE};

/// Width of the drawing. A README shows it at about this width, so that text keeps its size.
pub const WIDTH: u32 = 920;
/// Height of title, subtitle and a legend of one row.
pub const HEADER: u32 = 104;
/// Height of what the header has besides: what the sizes are, and each further row of a legend.
pub const ROW: u32 = 24;
/// Space at the left and right edge of the header.
pub const EDGE: i32 = 16;
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

/// What the colours become on a dark page: a background as dark as the page, and lighter lines.
const DARK: [(RGBColor, RGBColor); 6] = [
    (WHITE, RGBColor(13, 17, 23)),
    (TEXT, RGBColor(225, 228, 232)),
    (GRID, RGBColor(48, 54, 61)),
    (FLOOR, RGBColor(160, 166, 173)),
    (OURS, RGBColor(86, 180, 233)),
    (PEER, RGBColor(240, 178, 50)),
];

/// `svg` with rules for readers who prefer dark pages. The others see it as it was.
pub fn with_dark_mode(svg: &str) -> String {
    let mut rules = String::from("<style>\n@media (prefers-color-scheme: dark) {\n");
    for (light, dark) in DARK {
        let [light, dark] =
            [light, dark].map(|RGBColor(r, g, b)| format!("#{r:02X}{g:02X}{b:02X}"));
        for property in ["fill", "stroke"] {
            rules += &format!("[{property}=\"{light}\"] {{ {property}: {dark} }}\n");
        }
    }
    rules += "}\n</style>\n";
    match svg.rfind("</svg>") {
        Some(end) => format!("{}{rules}{}", &svg[..end], &svg[end..]),
        None => svg.to_owned(),
    }
}

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
