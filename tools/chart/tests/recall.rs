//! The chart of a clustered head.

use std::path::Path;
use std::process::{Command, Output};

use ds4_chart::recall::{Recall, draw};

const OURS: &str = "#0072B2";
const PEER: &str = "#E69F00";
const FLOOR: &str = "#5A5A5A";

/// An evaluation with these probes (the inside of the JSON list) and acceptance of the dense head.
fn evaluation(probes: &str, dense: &str) -> String {
    format!(
        "{{\"tokens\":9,\"flash_head\":{{\"clusters\":64,\"capacity\":16,\"positions\":9,\
         \"drafts\":8,\"dense_acceptance\":{dense},\"probes\":[{probes}],\"generation\":[]}}}}"
    )
}

fn probe(probes: u64, recall: f64, acceptance: &str) -> String {
    format!(
        r#"{{"probes":{probes},"recall":{recall},"draft_recall":0.5,"acceptance":{acceptance}}}"#
    )
}

fn three() -> String {
    let probes = [
        probe(1, 0.25, "0.125"),
        probe(8, 0.75, "0.5"),
        probe(64, 1.0, "0.625"),
    ];
    evaluation(&probes.join(","), "0.625")
}

fn parse(text: &str) -> Result<Recall, String> {
    Recall::parse(Path::new("eval.json"), text).map_err(|error| error.to_string())
}

/// The points of the polygons in a colour, their centres.
fn marks(svg: &str, color: &str) -> Vec<(f64, f64)> {
    let tags = svg.split('<').filter(|tag| tag.starts_with("polygon"));
    let tags = tags.filter(|tag| tag.contains(&format!("fill=\"{color}\"")));
    let centre = |tag: &str| {
        let points = tag
            .split("points=\"")
            .nth(1)
            .and_then(|rest| rest.split('"').next());
        let points: Vec<(f64, f64)> = points
            .expect("a polygon has points")
            .split_whitespace()
            .map(|point| {
                let (x, y) = point.split_once(',').expect("a pair");
                (x.parse().expect("a number"), y.parse().expect("a number"))
            })
            .collect();
        let middle = |of: fn(&(f64, f64)) -> f64| {
            let values = points.iter().map(of);
            (values.clone().fold(f64::INFINITY, f64::min) + values.fold(0.0, f64::max)) / 2.0
        };
        (middle(|p| p.0), middle(|p| p.1))
    };
    tags.map(centre).collect()
}

#[test]
fn a_table_has_a_row_for_each_number_of_probes_and_one_for_the_dense_head() {
    let table = parse(&three()).expect("an evaluation").markdown();
    let rows: Vec<&str> = table.lines().skip(2).collect();
    assert_eq!(
        rows,
        [
            "| 1 | 1.6 % | 25.0 % | 12.5 % |",
            "| 8 | 12.5 % | 75.0 % | 50.0 % |",
            "| 64 | 100.0 % | 100.0 % | 62.5 % |",
            "| dense head | 100.0 % | 100.0 % | 62.5 % |",
        ]
    );
}

#[test]
fn curves_go_through_their_shares() {
    let recall = parse(&three()).expect("an evaluation");
    let svg = draw(&recall, "a model").expect("a drawing");
    assert!(svg.contains("Clustered output head of a model"), "{svg}");
    assert!(
        svg.contains("64 clusters of 16 tokens, 9 positions"),
        "{svg}"
    );
    let (ours, theirs) = (marks(&svg, OURS), marks(&svg, PEER));
    assert_eq!((ours.len(), theirs.len()), (3, 3), "{svg}");
    for (a, b) in ours.iter().zip(&theirs) {
        assert!((a.0 - b.0).abs() <= 1.0, "{ours:?} {theirs:?}");
        assert!(a.1 < b.1, "a share that is higher is higher up");
    }
    // Probes are on a logarithmic axis, shares on a linear one.
    let [first, second, third] = [ours[0], ours[1], ours[2]];
    assert!(
        (2.0 * second.0 - first.0 - third.0).abs() <= 2.0,
        "{ours:?}"
    );
    assert!(
        ((first.1 - second.1) - 2.0 * (second.1 - third.1)).abs() <= 4.0,
        "{ours:?}"
    );
    let dashes = format!("stroke=\"{FLOOR}\"");
    assert!(svg.contains(&dashes), "the dense head's acceptance");
}

#[test]
fn a_model_without_drafts_has_the_recall_alone() {
    let recall = parse(&evaluation(&probe(1, 0.5, "null"), "null")).expect("an evaluation");
    let svg = draw(&recall, "a model").expect("a drawing");
    assert_eq!(marks(&svg, OURS).len(), 1);
    assert_eq!(marks(&svg, PEER).len(), 0);
    assert!(!svg.contains("acceptance"), "{svg}");
    assert!(recall.markdown().contains("| 1 | 1.6 % | 50.0 % | – |"));
}

#[test]
fn evaluations_that_cannot_be_are_refused_by_file() {
    let two = |a: &str, b: &str| evaluation(&[a, b].join(","), "0.5");
    for (text, named) in [
        (
            r#"{"tokens":9,"flash_head":null}"#.to_owned(),
            "`flash_head`",
        ),
        ("{".to_owned(), "EOF"),
        (evaluation("", "0.5"), "`probes` is empty"),
        (
            two(&probe(0, 0.5, "0.5"), &probe(1, 0.5, "0.5")),
            "`probes` is 0",
        ),
        (
            two(&probe(8, 0.5, "0.5"), &probe(4, 0.5, "0.5")),
            "expected 9 to 64",
        ),
        (
            evaluation(&probe(65, 0.5, "0.5"), "0.5"),
            "expected 1 to 64",
        ),
        (evaluation(&probe(1, 1.5, "0.5"), "0.5"), "1.5 is no share"),
        (
            evaluation(&probe(1, 0.5, "-0.5"), "0.5"),
            "-0.5 is no share",
        ),
        (evaluation(&probe(1, 0.5, "0.5"), "2.0"), "2 is no share"),
    ] {
        let error = parse(&text).expect_err(named);
        assert!(
            error.starts_with("eval.json:1: ") && error.contains(named),
            "{text}: {error}"
        );
    }
}

#[test]
fn the_program_writes_a_drawing_and_prints_a_table() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (input, out) = (dir.path().join("eval.json"), dir.path().join("recall.svg"));
    std::fs::write(&input, three()).expect("the directory is writable");
    let chart = |input: &Path| -> Output {
        Command::new(env!("CARGO_BIN_EXE_ds4-chart"))
            .arg("recall")
            .arg(input)
            .arg("--out")
            .arg(&out)
            .output()
            .expect("the program starts")
    };
    let ended = chart(&input);
    assert!(ended.status.success(), "{ended:?}");
    let recall = parse(&three()).expect("an evaluation");
    assert_eq!(String::from_utf8_lossy(&ended.stdout), recall.markdown());
    let drawing = std::fs::read_to_string(&out).expect("a drawing");
    assert_eq!(drawing, draw(&recall, "ds4-tiny").expect("a drawing"));
    let ended = chart(Path::new("no/such/file"));
    assert!(!ended.status.success(), "{ended:?}");
    assert!(
        String::from_utf8_lossy(&ended.stderr).contains("no/such/file"),
        "{ended:?}"
    );
}
