//! Pairing measurements with peers, and arranging them.

mod common;

use std::path::PathBuf;

use common::{chart, ours, peer};
use ds4_chart::chart::Chart;
use ds4_chart::input::{Located, Peer, read};
use ds4_chart::table::markdown;

/// Measurements of all combinations of some columns' values, the last column fastest.
fn grid(columns: &[(&str, &[u64])], variants: &[&str]) -> Vec<String> {
    let mut shapes = vec![String::new()];
    for (name, values) in columns {
        let with = |shape: &String| -> Vec<String> {
            let comma = if shape.is_empty() { "" } else { "," };
            values
                .iter()
                .map(|v| format!(r#"{shape}{comma}"{name}":{v}"#))
                .collect()
        };
        shapes = shapes.iter().flat_map(with).collect();
    }
    let lines = variants
        .iter()
        .flat_map(|v| shapes.iter().map(move |shape| ours(shape, v, 2.0)));
    lines.collect()
}

fn titles(chart: &Chart) -> Vec<&str> {
    chart
        .panels
        .iter()
        .map(|panel| panel.title.as_str())
        .collect()
}

#[test]
fn a_measurement_is_paired_with_the_peer_of_its_variant_and_shape() {
    let lines = [
        ours(r#""N":1,"E":256"#, "a", 2.0),
        ours(r#""N":2,"E":256"#, "a", 3.0),
        ours(r#""N":2,"E":256"#, "b", 4.0),
    ];
    let peers = [
        peer(r#""E":256,"N":2"#, "a", 6.0, "1.5"),
        peer(r#""E":256,"N":2"#, "b", 5.0, "null"),
        peer(r#""E":256,"N":4"#, "a", 7.0, "null"),
        peer(r#""E":256,"N":1"#, "a", 8.0, "null").replace("sort\",\"shape", "other\",\"shape"),
    ];
    let chart = chart(&lines, &peers).unwrap();
    let cases: Vec<_> = chart
        .panels
        .iter()
        .flat_map(|panel| panel.cases())
        .collect();
    let found: Vec<_> = cases
        .iter()
        .map(|c| (c.ours, c.ratio(), c.floor()))
        .collect();
    assert_eq!(
        found,
        [
            (Some(2.0), None, None),
            (Some(3.0), Some(0.5), Some(1.5)),
            (Some(4.0), Some(0.8), None)
        ]
    );
}

#[test]
fn the_column_with_the_most_values_is_the_x_axis_and_the_others_make_panels() {
    let chart = chart(
        &grid(&[("E", &[384, 256]), ("N", &[1, 64, 8])], &["topk"]),
        &[],
    )
    .unwrap();
    assert_eq!((chart.x_column.as_str(), &chart.line_column), ("N", &None));
    assert_eq!(titles(&chart), ["E = 256", "E = 384"]);
    assert_eq!(chart.panels[0].lines.len(), 1);
    let xs: Vec<u64> = chart.panels[0].lines[0]
        .points
        .iter()
        .map(|(x, _)| *x)
        .collect();
    assert_eq!(xs, [1, 8, 64]);
}

#[test]
fn columns_that_vary_together_make_one_panel_each_not_two() {
    let mut lines = grid(&[("N", &[1, 2, 3]), ("E", &[256]), ("H", &[4096])], &["v"]);
    lines.extend(grid(
        &[("N", &[1, 2, 3]), ("E", &[384]), ("H", &[7168])],
        &["v"],
    ));
    assert_eq!(
        titles(&chart(&lines, &[]).unwrap()),
        ["E = 256, H = 4096", "E = 384, H = 7168"]
    );
}

#[test]
fn a_column_that_goes_with_the_x_axis_does_not_tear_its_line() {
    let lines = [(256, 4096), (384, 7168), (512, 8192)];
    let lines = lines.map(|(e, h)| ours(&format!(r#""E":{e},"H":{h}"#), "v", 2.0));
    let chart = chart(&lines, &[]).unwrap();
    assert_eq!(chart.x_column, "E");
    assert_eq!((chart.panels.len(), chart.panels[0].lines.len()), (1, 1));
    assert_eq!(chart.panels[0].lines[0].points.len(), 3);
}

#[test]
fn many_combinations_turn_the_closest_column_into_lines() {
    let columns: [(&str, &[u64]); 3] = [
        ("R", &[1, 8, 32, 64]),
        ("C", &[4096, 32768, 129280]),
        ("k", &[512, 1024, 2048]),
    ];
    let chart = chart(&grid(&columns, &["full", "ragged"]), &[]).unwrap();
    assert_eq!(
        (chart.x_column.as_str(), chart.line_column.as_deref()),
        ("R", Some("k"))
    );
    assert_eq!(
        titles(&chart),
        [
            "full, C = 4096",
            "full, C = 32768",
            "full, C = 129280",
            "ragged, C = 4096",
            "ragged, C = 32768",
            "ragged, C = 129280"
        ]
    );
    assert_eq!(chart.line_values(), [512, 1024, 2048]);
    assert_eq!(chart.panels[5].lines[1].points.len(), 4);
}

#[test]
fn of_equally_long_columns_the_wider_is_the_x_axis() {
    let columns: [(&str, &[u64]); 3] = [
        ("V", &[1, 2]),
        ("T", &[1, 2, 4, 8]),
        ("P", &[64, 256, 512, 1024]),
    ];
    let chart = chart(&grid(&columns, &["v"]), &[]).unwrap();
    assert_eq!(
        (chart.x_column.as_str(), chart.line_column.as_deref()),
        ("P", Some("T"))
    );
    assert_eq!(titles(&chart), ["V = 1", "V = 2"]);
}

#[test]
fn a_case_that_occurs_twice_is_an_error_naming_both_lines() {
    let line = ours(r#""N":1,"E":2"#, "v", 2.0);
    let again = ours(r#""E":2,"N":1"#, "v", 3.0);
    let said = chart(&[line.clone(), again], &[]).unwrap_err().to_string();
    assert_eq!(said, "ours.jsonl:2: the same case as ours.jsonl:1");
    let peers = [
        peer(r#""N":1"#, "v", 2.0, "null"),
        peer(r#""N":1"#, "v", 3.0, "null"),
    ];
    let said = chart(&[line], &peers).unwrap_err().to_string();
    assert_eq!(said, "peers.jsonl:2: the same case as peers.jsonl:1");
}

#[test]
fn shapes_with_other_columns_are_an_error() {
    let lines = [
        ours(r#""N":1,"E":2"#, "v", 2.0),
        ours(r#""N":1,"H":2"#, "v", 2.0),
    ];
    let said = chart(&lines, &[]).unwrap_err().to_string();
    assert_eq!(
        said,
        "ours.jsonl:2: the shape has columns H N, others have E N"
    );
}

#[test]
fn the_table_has_a_row_for_each_case_and_dashes_for_what_is_not_known() {
    let untimed = ours(r#""N":4"#, "a", 2.0).replace(r#""us":2,"#, r#""us":null,"#);
    let untimed = untimed.replace("0.25", "null");
    let lines = [
        ours(r#""N":2"#, "a", 1.52),
        ours(r#""N":1"#, "a", 1.48),
        untimed,
    ];
    let peers = [
        peer(r#""N":2"#, "a", 3.0, "0.0"),
        peer(r#""N":4"#, "a", 4.0, "1.0"),
    ];
    let table = markdown(&chart(&lines, &peers).unwrap());
    let expected = "\
| shape | ours us | best peer us (which) | ratio | floor us | share of copy |
|---|---|---|---|---|---|
| N=1 | 1.5 | – | – | – | 25 % |
| N=2 | 1.5 | 3.0 (quick\\|sort) | 0.51 | 0.0 | 25 % |
| N=4 | – | 4.0 (quick\\|sort) | – | 1.0 | – |
";
    assert_eq!(table, expected);
}

#[test]
fn the_table_names_the_variant_where_there_are_several() {
    let lines = [
        ours(r#""N":1"#, "full", 2.0),
        ours(r#""N":1"#, "ragged", 3.0),
    ];
    let table = markdown(&chart(&lines, &[]).unwrap());
    let rows: Vec<_> = table.lines().skip(2).collect();
    assert_eq!(
        rows,
        [
            "| full N=1 | 2.0 | – | – | – | 25 % |",
            "| ragged N=1 | 3.0 | – | – | – | 25 % |"
        ]
    );
}

#[test]
fn the_peers_kept_here_are_complete_and_never_faster_than_a_tenth_below_their_floor() {
    // At run time: the test may have been built in another checkout with the same target directory.
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").expect("a test that cargo runs");
    let file = PathBuf::from(manifest).join("../../docs/benchmarks/h200/peers.jsonl");
    let peers: Located<Peer> = read(&[file]).unwrap();
    let mut counts = std::collections::BTreeMap::new();
    for (location, p) in &peers {
        *counts
            .entry((p.op.as_str(), p.variant.as_str()))
            .or_insert(0) += 1;
        assert!(
            p.us >= 0.9 * p.floor_us.unwrap_or(0.0),
            "{location}: {} us",
            p.us
        );
    }
    let expected = [
        (("activation_topk", "topk"), 14),
        (("dense_router", "fused"), 16),
        (("flash_head_argmax", "two_stage"), 32),
        (("gated_delta_rule", "every"), 64),
        (("gated_delta_rule", "final"), 64),
        (("hash_route", "hash"), 14),
        (("small_m_matmul", "bf16_bf16_bf16"), 15),
        (("top_k_per_row", "full"), 54),
        (("top_k_per_row", "ragged"), 54),
    ];
    assert_eq!(counts.into_iter().collect::<Vec<_>>(), expected);
}
