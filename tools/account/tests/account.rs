//! From what a profiler printed to the table.

use std::process::{Command, Output};

use ds4_account::account::{Line, Span, by_kernel, in_order, step};
use ds4_account::profile::{Launch, function_name, parse};

const HEADER: &str = concat!(
    r#""ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","#,
    r#""Block Size","Grid Size","Device","CC","#,
    r#""Section Name","Metric Name","Metric Unit","Metric Value""#
);

/// A line of a profile.
fn line(id: usize, kernel: &str, metric: &str, unit: &str, value: &str) -> String {
    format!(
        "\"{id}\",\"652\",\"step\",\"host\",\"{kernel}\",\"1\",\"7\",\
         \"(128, 1, 1)\",\"(1024, 1, 1)\",\"0\",\"9.0\",\
         \"Command line profiler metrics\",\"{metric}\",\"{unit}\",\"{value}\""
    )
}

/// The lines of a launch: its time, and the bytes that it reads and writes. Each is a unit and a
/// value.
fn launch(id: usize, kernel: &str, [time, read, written]: [(&str, &str); 3]) -> String {
    [
        ("dram__bytes_read.sum", read),
        ("dram__bytes_write.sum", written),
        ("gpu__time_duration.sum", time),
    ]
    .map(|(metric, (unit, value))| line(id, kernel, metric, unit, value))
    .join("\n")
}

const MARK: [(&str, &str); 3] = [("usecond", "1.5"), ("byte", "0"), ("byte", "4")];

/// Two marked steps. The second has three launches, two of them of one kernel for different shapes.
fn profile() -> String {
    let matrix = "small_m_kernel_x_bf16_w_bf16_y_f32_n_8_";
    let norm = "rms_norm_kernel_f_f32_w_f32_n_4_1c2d3e4f";
    let mark = "prng_kernel_f_uniform_e_f32_n_1_0badc0de";
    [
        "==PROF== Connected to process 652 (step)".to_owned(),
        "one launched step, said the program".to_owned(),
        HEADER.to_owned(),
        launch(0, mark, MARK),
        launch(1, norm, [("usecond", "9"), ("Kbyte", "9"), ("Kbyte", "9")]),
        launch(2, mark, MARK),
        launch(
            3,
            &format!("{matrix}deadbeef"),
            [("nsecond", "4,500"), ("Mbyte", "8.6"), ("byte", "0")],
        ),
        launch(
            4,
            &format!("{matrix}00c0ffee"),
            [("usecond", "1.5"), ("Kbyte", "4,299.5"), ("byte", "500")],
        ),
        "==PROF== Disconnected from process 652".to_owned(),
        launch(
            5,
            norm,
            [("nsecond", "2,000"), ("byte", "1,000"), ("Kbyte", "3.3")],
        ),
        launch(6, mark, MARK),
    ]
    .join("\n")
}

fn between() -> Span {
    Span::Between("prng_kernel".to_owned())
}

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[track_caller]
fn assert_lines(actual: &[Line], expected: &[(&str, usize, f64, f64)]) {
    assert_eq!(actual.len(), expected.len(), "{actual:?}");
    for (line, (kernel, launches, us, bytes)) in actual.iter().zip(expected) {
        assert_eq!((line.kernel.as_str(), line.launches), (*kernel, *launches));
        assert!((line.us - us).abs() < 1e-9, "{line:?}, {us} us");
        assert!((line.bytes - bytes).abs() < 1e-3, "{line:?}, {bytes} bytes");
    }
}

#[test]
fn a_step_is_what_lies_between_the_last_two_marks() {
    let launches = parse(&profile()).unwrap();
    let (step, before) = step(&launches, &between()).unwrap();
    assert_eq!((launches.len(), before), (7, 3));
    assert_lines(
        &in_order(step),
        &[
            ("small_m_kernel", 2, 6.0, 12.9e6),
            ("rms_norm_kernel", 1, 2.0, 4300.0),
        ],
    );
}

#[test]
fn the_last_launches_can_be_taken_instead() {
    let launches = parse(&profile()).unwrap();
    let (last, before) = step(&launches, &Span::Last(2)).unwrap();
    assert_eq!((last[0].kernel.as_str(), before), ("rms_norm_kernel", 5));
    let error = |span| step(&launches, &span).unwrap_err().to_string();
    assert_eq!(
        error(Span::Last(8)),
        "8 launches were asked for, 7 were profiled"
    );
    assert_eq!(error(Span::Last(0)), "there is no launch between the marks");
}

#[test]
fn neighbours_are_one_line_and_kernels_can_be() {
    let launch = |kernel: &str, us| Launch {
        kernel: kernel.to_owned(),
        us,
        bytes: 10.0,
    };
    let launches = [
        launch("a", 1.0),
        launch("b", 4.0),
        launch("b", 0.5),
        launch("a", 2.0),
    ];
    assert_lines(
        &in_order(&launches),
        &[
            ("a", 1, 1.0, 10.0),
            ("b", 2, 4.5, 20.0),
            ("a", 1, 2.0, 10.0),
        ],
    );
    assert_lines(
        &by_kernel(&launches),
        &[("b", 2, 4.5, 20.0), ("a", 2, 3.0, 20.0)],
    );
}

#[test]
fn a_step_without_two_marks_or_launches_is_an_error() {
    let of = |kernels: &[&str]| {
        let launches = kernels.iter().map(|kernel| Launch {
            kernel: (*kernel).to_owned(),
            us: 1.0,
            bytes: 1.0,
        });
        let launches: Vec<_> = launches.collect();
        step(&launches, &between()).unwrap_err().to_string()
    };
    let mark = "prng_kernel";
    assert!(of(&["a", "b"]).starts_with("0 of 2 launches of prng_kernel"));
    assert!(of(&["a", mark, "b"]).starts_with("1 of 2 launches of prng_kernel"));
    assert_eq!(
        of(&[mark, "a", mark, mark]),
        "there is no launch between the marks"
    );
}

#[test]
fn a_kernel_is_named_by_its_function() {
    for (kernel, function) in [
        ("kernel_binop_c_f32_n_1_fcc3f62a", "kernel_binop"),
        ("unary_float_f_f32_n_4_54ca10fc", "unary_float"),
        (
            "reduce_kernel_in_f32_in_size_4_acc_f32_0badc0de",
            "reduce_kernel",
        ),
        ("matmul_entry_lhs_f32_lhs_size_4_0badc0de", "matmul_entry"),
        (
            "rotate_at_kernel_f_bf16_i_i32_n_8_0badc0de",
            "rotate_at_kernel",
        ),
        ("split_rows_0badc0de", "split_rows"),
        ("large_m_kernel", "large_m_kernel"),
        ("void gemv(float const*, int)", "void gemv"),
        (
            "cut_by_a_word_of_eight_letters",
            "cut_by_a_word_of_eight_letters",
        ),
    ] {
        assert_eq!(function_name(kernel), function);
    }
}

#[test]
fn a_profile_that_cannot_be_read_says_why() {
    let columns = "no line names the columns ID, Kernel Name, Metric Name, Metric Unit, \
                   Metric Value: was it printed by `ncu --csv`, and not with `--page raw`?";
    assert_eq!(error(""), columns);
    assert_eq!(error("==ERROR== no permission\n"), columns);
    assert_eq!(error(HEADER), "no launch was profiled");
    let profile = profile();
    let damaged = |from: &str, to: &str| {
        assert!(profile.contains(from), "{from}");
        error(&profile.replacen(from, to, 1))
    };
    assert_eq!(
        damaged(r#""usecond","9""#, r#""usecond","n/a""#),
        r#"line 9: "n/a" is not a measurement"#
    );
    assert_eq!(
        damaged(r#""Kbyte","9""#, r#""Gibyte","9""#),
        r#"line 7: the unit is "Gibyte", not one of byte, Kbyte, Mbyte, Gbyte"#
    );
    assert_eq!(
        damaged(r#","Kbyte","9""#, ""),
        "line 7: there is no Metric Unit"
    );
    assert_eq!(
        damaged(r#""Kbyte","9""#, r#""Kbyte","9"#),
        "line 7: a quote is not closed"
    );
}

#[test]
fn a_launch_without_a_metric_is_named() {
    for metric in [
        "dram__bytes_read.sum",
        "dram__bytes_write.sum",
        "gpu__time_duration.sum",
    ] {
        let profile = profile();
        let kept: Vec<&str> = profile
            .lines()
            .filter(|line| !(line.starts_with("\"5\"") && line.contains(metric)))
            .collect();
        assert_eq!(
            error(&kept.join("\n")),
            format!("launch 5 (rms_norm_kernel) has no {metric}: name it in ncu's --metrics")
        );
    }
}

fn run(arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("step.csv"), profile()).unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_ds4-account"));
    program
        .current_dir(folder.path())
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn the_program_prints_a_table_with_the_total_and_the_floor() {
    let output = run(&["step.csv", "--copy-rate", "4.3"]);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "| kernel | launches | us | MB | share of the copy rate |\n|---|---|---|---|---|\n\
         | small_m_kernel | 2 | 6.0 | 12.90 | 50 % |\n\
         | rms_norm_kernel | 1 | 2.0 | 0.00 | 0 % |\n\
         | total | 3 | 8.0 | 12.90 | 38 % |\n\n\
         Floor, the bytes at 4.3 TB/s: 3.0 us; the launches take 2.67 times that.\n\n\
         3 launches, and 3 that were profiled before them.\n"
    );
}

#[test]
fn layers_divide_all_figures_but_the_shares() {
    let output = run(&["step.csv", "--layers", "2", "--by-kernel"]);
    let printed = String::from_utf8_lossy(&output.stdout);
    for expected in [
        "| small_m_kernel | 1.0 | 3.0 | 6.45 | 50 % |",
        "| total | 1.5 | 4.0 | 6.45 | 38 % |",
        "Floor, the bytes at 4.3 TB/s: 1.5 us; the launches take 2.67 times that, \
         divided by 2 layers.",
    ] {
        assert!(printed.lines().any(|line| line == expected), "{printed}");
    }
}

#[test]
fn launches_without_marks_can_be_counted() {
    let output = run(&["step.csv", "--last", "1", "--layers", "1"]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        printed.ends_with("\n1 launches, and 6 that were profiled before them.\n"),
        "{printed}"
    );
}

#[test]
fn the_program_fails_with_the_reason() {
    for (arguments, reason) in [
        (&["none.csv"][..], "cannot read none.csv"),
        (
            &["step.csv", "--marker", "other"],
            "0 of 2 launches of other that mark the step",
        ),
        (&["step.csv", "--layers", "0"], "not a number of layers"),
        (&["step.csv", "--copy-rate", "0"], "not a rate"),
    ] {
        let output = run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(reason), "{said}");
        assert!(output.stdout.is_empty());
    }
}
