//! The SVG and the program that writes it.

mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::{chart, ours, peer};
use ds4_chart::svg::draw;

const OURS: &str = "#0072B2";
const PEER: &str = "#E69F00";
const FLOOR: &str = "#5A5A5A";

/// The tags of `svg`, which must close in the order they open.
fn tags(svg: &str) -> Vec<&str> {
    let mut open: Vec<&str> = Vec::new();
    let mut tags = Vec::new();
    let mut rest = svg;
    while let Some(start) = rest.find('<') {
        assert!(
            !rest[..start].contains('>'),
            "a stray > in {:?}",
            &rest[..start]
        );
        let end = start + rest[start..].find('>').expect("a tag without an end");
        let tag = &rest[start + 1..end];
        assert!(
            !tag.contains('<') && tag.matches('"').count().is_multiple_of(2),
            "{tag:?}"
        );
        let name = tag.split_whitespace().next().unwrap();
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name)),
            None if !tag.ends_with('/') => open.push(name),
            None => {}
        }
        assert!(
            !open.is_empty() || tag == "/svg",
            "outside of the root: {tag:?}"
        );
        tags.push(tag);
        rest = &rest[end + 1..];
    }
    assert_eq!(open, Vec::<&str>::new());
    tags
}

/// Numbers of lines and of marks in a colour, the legend's line included.
fn series(svg: &str, color: &str) -> (usize, usize) {
    let count = |tag: &str, attribute: &str| {
        let wanted = format!("{attribute}=\"{color}\"");
        tags(svg)
            .iter()
            .filter(|t| t.starts_with(tag) && t.contains(&wanted))
            .count()
    };
    (count("polyline", "stroke"), count("polygon", "fill"))
}

fn lines() -> Vec<String> {
    [(1, 2.0), (8, 2.5), (512, 30.0)]
        .map(|(n, us)| ours(&format!(r#""N":{n}"#), "v", us))
        .to_vec()
}

fn peers() -> Vec<String> {
    [(1, "0.0"), (8, "0.5"), (512, "10.0")]
        .map(|(n, floor)| peer(&format!(r#""N":{n}"#), "v", 40.0, floor))
        .to_vec()
}

/// The points of each solid line or dash in a colour.
fn paths(svg: &str, color: &str) -> Vec<Vec<(i32, i32)>> {
    let lines = tags(svg)
        .into_iter()
        .filter(|t| t.starts_with("polyline") && t.contains(color));
    let pair = |text: &str| {
        let (x, y) = text.split_once(',').unwrap();
        (x.parse().unwrap(), y.parse().unwrap())
    };
    let points = lines.map(|tag| {
        tag.split("points=\"")
            .nth(1)
            .unwrap()
            .split('"')
            .next()
            .unwrap()
    });
    points
        .map(|points| points.split_whitespace().map(pair).collect())
        .collect()
}

/// The points of the longest line in a colour: of a series, whose legend has two.
fn points(svg: &str, color: &str) -> Vec<(i32, i32)> {
    paths(svg, color).into_iter().max_by_key(Vec::len).unwrap()
}

#[test]
fn a_floor_rounded_to_zero_is_left_out_and_the_rest_drawn() {
    let svg = draw(&chart(&lines(), &peers()).unwrap(), "gpu").unwrap();
    let ours = points(&svg, OURS);
    let floor = paths(&svg, FLOOR).concat();
    let drawn = || floor.iter().filter(|(_, y)| *y > 110);
    assert_eq!(drawn().map(|(x, _)| *x).min(), Some(ours[1].0));
    assert!(
        drawn().all(|(x, y)| *x <= ours[2].0 && *y < 434),
        "{floor:?}"
    );
}

#[test]
fn a_chart_is_well_formed_and_has_all_three_series() {
    let svg = draw(&chart(&lines(), &peers()).unwrap(), "Some <GPU> & more").unwrap();
    assert_eq!(series(&svg, OURS), (2, 3));
    assert_eq!(series(&svg, PEER), (2, 3));
    assert!(series(&svg, FLOOR).0 > 10, "the floor is not dashed");
    for text in [
        "sort on Some &lt;GPU&gt; &amp; more, f32, through nvrtc",
        "lower is better; cold inputs, CUDA graph replay",
        "ours",
        "best peer",
        "floor: bytes to move / copy rate",
        "microseconds",
    ] {
        assert!(svg.contains(&format!(">\n{text}\n<")), "no text {text:?}");
    }
    let background = tags(&svg)[1];
    assert!(
        background.starts_with("rect x=\"0\" y=\"0\"") && background.contains("fill=\"#FFFFFF\"")
    );
}

#[test]
fn both_axes_are_logarithmic() {
    let lines =
        [(1, 2.0), (10, 20.0), (100, 200.0)].map(|(n, us)| ours(&format!(r#""N":{n}"#), "v", us));
    let at = points(&draw(&chart(&lines, &[]).unwrap(), "gpu").unwrap(), OURS);
    assert_eq!(at.len(), 3);
    assert!(
        ((at[2].0 - at[1].0) - (at[1].0 - at[0].0)).abs() <= 1,
        "{at:?}"
    );
    assert!(
        ((at[2].1 - at[1].1) - (at[1].1 - at[0].1)).abs() <= 1,
        "{at:?}"
    );
    assert!(at[2].0 > at[0].0 && at[2].1 < at[0].1, "{at:?}");
}

#[test]
fn a_case_without_a_peer_is_drawn_without_one() {
    let svg = draw(&chart(&lines(), &peers()[1..]).unwrap(), "gpu").unwrap();
    assert_eq!((series(&svg, OURS).1, series(&svg, PEER).1), (3, 2));
    let svg = draw(&chart(&lines(), &[]).unwrap(), "gpu").unwrap();
    assert_eq!((series(&svg, OURS).1, series(&svg, PEER).1), (3, 0));
}

#[test]
fn a_single_case_and_a_panel_without_times_are_drawn() {
    let svg = draw(&chart(&lines()[..1], &[]).unwrap(), "gpu").unwrap();
    assert_eq!(series(&svg, OURS).1, 1);
    let untimed = ours(r#""N":1"#, "w", 2.0).replace(r#""us":2,"#, r#""us":null,"#);
    let svg = draw(&chart(&[lines()[0].clone(), untimed], &[]).unwrap(), "gpu").unwrap();
    assert_eq!(series(&svg, OURS).1, 1);
}

#[test]
fn a_floor_common_to_all_lines_is_drawn_once() {
    let shape = |n, t| format!(r#""N":{n},"T":{t}"#);
    let all: Vec<_> = (1..=6)
        .flat_map(|n| (1..=5).map(move |t| shape(n, t)))
        .collect();
    let lines: Vec<_> = all.iter().map(|s| ours(s, "v", 2.0)).collect();
    let with = |floor: &str| -> Vec<_> { all.iter().map(|s| peer(s, "v", 4.0, floor)).collect() };
    let dashes =
        |peers: &[String]| series(&draw(&chart(&lines, peers).unwrap(), "gpu").unwrap(), FLOOR).0;
    let common = dashes(&with("1.0"));
    let mut apart = with("1.0");
    for peer in apart.iter_mut().filter(|peer| peer.contains(r#""T":5"#)) {
        *peer = peer.replace("\"floor_us\":1.0", "\"floor_us\":1.5");
    }
    let legend = dashes(&with("null"));
    assert!(common > legend);
    assert_eq!(dashes(&apart) - legend, 2 * (common - legend));
}

#[test]
fn a_legend_of_many_lines_ends_before_the_right_edge() {
    let shape = |r, c: u64| format!(r#""R":{r},"C":{c}"#);
    let columns: Vec<u64> = (0..12).map(|i| 1_048_576 + i).collect();
    let lines: Vec<_> = (0..13)
        .flat_map(|r| columns.iter().map(move |&c| shape(1 << r, c)))
        .map(|shape| ours(&shape, "v", 2.0).replace("\"sort\"", "\"top_k_per_row\""))
        .collect();
    let svg = draw(&chart(&lines, &[]).unwrap(), "gpu").unwrap();
    let mut ends = Vec::new();
    for column in &columns {
        let name = format!("C = {column}");
        let at = svg
            .find(&format!(">\n{name}\n<"))
            .unwrap_or_else(|| panic!("no {name}"));
        let tag = &svg[svg[..at].rfind("<text").unwrap()..at];
        let x = tag.split("x=\"").nth(1).unwrap().split('"').next().unwrap();
        // Digits and capitals of 14 pixels are at most 9 wide.
        ends.push(x.parse::<usize>().unwrap() + 9 * name.len());
    }
    assert!(ends.iter().all(|end| *end <= 920), "{ends:?}");
    assert!(
        ends.windows(2).any(|pair| pair[1] < pair[0]),
        "one row: {ends:?}"
    );
    for text in ["R: rows, C: columns of a row", "R: rows"] {
        assert!(svg.contains(&format!(">\n{text}\n<")), "no text {text:?}");
    }
}

#[test]
fn every_colour_has_one_for_dark_pages() {
    let svg = draw(&chart(&lines(), &peers()).unwrap(), "gpu").unwrap();
    let (drawing, style) = svg.split_at(svg.find("<style>").unwrap());
    assert!(style.contains("@media (prefers-color-scheme: dark)"));
    for property in ["fill", "stroke"] {
        for rest in drawing.split(&format!(" {property}=\"#")).skip(1) {
            let rule = format!("[{property}=\"#{}\"]", &rest[..6]);
            assert!(style.contains(&rule), "no rule {rule}");
        }
    }
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_ds4-chart"));
    program
        .current_dir(folder)
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn the_program_writes_the_same_chart_and_table_every_time() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("ours.jsonl"), lines().join("\n")).unwrap();
    std::fs::write(folder.path().join("peers.jsonl"), peers().join("\n")).unwrap();
    let made = ["a.svg", "b.svg"].map(|out| {
        let output = run(
            folder.path(),
            &["ours.jsonl", "--peers", "peers.jsonl", "--out", out],
        );
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        (
            output.stdout,
            std::fs::read_to_string(folder.path().join(out)).unwrap(),
        )
    });
    assert_eq!(made[0], made[1]);
    let table = String::from_utf8_lossy(&made[0].0);
    assert!(
        table.contains("\n| N=512 | 30.0 | 40.0 (quick\\|sort) | 0.75 | 10.0 | 25 % |\n"),
        "{table}"
    );
    assert!(made[0].1.contains("sort on NVIDIA H200, f32"));
}

#[test]
fn the_program_writes_nothing_when_the_input_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = lines().join("\n").replacen("true", "false", 1);
    std::fs::write(folder.path().join("ours.jsonl"), wrong).unwrap();
    let output = run(folder.path(), &["ours.jsonl", "--out", "a.svg"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "error: ours.jsonl:1: the result was not verified\n"
    );
    assert!(output.stdout.is_empty() && !folder.path().join("a.svg").exists());
}
