//! The table on standard output and the lines of JSON.

use std::{fs, io, path::PathBuf};

use serde::{Serialize, Serializer};
use serde_json::Value;

use super::{Case, measure::Times};

/// One result. Numbers that are absent or not finite are null.
#[derive(Serialize)]
struct Line {
    op: &'static str,
    #[serde(serialize_with = "as_map")]
    shape: Vec<(&'static str, usize)>,
    variant: &'static str,
    dtype: String,
    us: Option<f64>,
    eager_us: Option<f64>,
    gbps: Option<f64>,
    share_of_copy: Option<f64>,
    verified: bool,
    codegen: &'static str,
}

fn as_map<S: Serializer>(
    pairs: &[(&'static str, usize)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().copied())
}

/// Writes results as they arrive.
pub struct Report {
    codegen: &'static str,
    copy_gbps: f64,
    folder: Option<PathBuf>,
    width: usize,
}

impl Report {
    /// Prints the head of the table. With a `folder`, results also go to `<op>.jsonl` in it.
    ///
    /// # Errors
    ///
    /// If the folder cannot be created.
    pub fn new(
        codegen: &'static str,
        copy_gbps: f64,
        folder: Option<PathBuf>,
        cases: &[Case],
    ) -> io::Result<Self> {
        if let Some(folder) = &folder {
            fs::create_dir_all(folder)?;
        }
        let width = cases.iter().map(|case| case.id().len()).max().unwrap_or(0);
        println!(
            "{:width$} {:>10} {:>10} {:>8} {:>8} {:>6}  verified",
            "case", "us", "eager us", "GB/s", "TFLOP/s", "copy"
        );
        Ok(Self {
            codegen,
            copy_gbps,
            folder,
            width,
        })
    }

    /// Adds a row. Without `times`, it is the row of a case whose outputs were wrong.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn add(&self, case: &Case, times: Option<Times>) -> io::Result<()> {
        let us = times.and_then(|times| times.replayed);
        let eager_us = times.map(|times| times.eager);
        let time = us.or(eager_us);
        let gbps = time.map(|us| case.bytes as f64 / us / 1e3);
        let share_of_copy = gbps.map(|gbps| gbps / self.copy_gbps);
        let tflops = time.and_then(|us| Some(case.flops? as f64 / us / 1e6));
        let verified = times.is_some();
        println!(
            "{:width$} {:>10} {:>10} {:>8} {:>8} {:>6}  {}",
            case.id(),
            cell(us, 2),
            cell(eager_us, 2),
            cell(gbps, 1),
            cell(tflops, 1),
            cell(share_of_copy, 3),
            if verified { "yes" } else { "NO" },
            width = self.width,
        );
        self.append(&Line {
            op: case.op,
            shape: case.shape.clone(),
            variant: case.variant,
            dtype: case.dtype_name(),
            us: us.map(rounded),
            eager_us: eager_us.map(rounded),
            gbps: gbps.map(rounded),
            share_of_copy: share_of_copy.map(rounded),
            verified,
            codegen: self.codegen,
        })
    }

    /// Replaces the line of the same case and code generator, so that several runs can fill one
    /// file.
    fn append(&self, line: &Line) -> io::Result<()> {
        let Some(folder) = &self.folder else {
            return Ok(());
        };
        let path = folder.join(format!("{}.jsonl", line.op));
        let old = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            other => other?,
        };
        let key = |value: &Value| {
            ["op", "shape", "variant", "dtype", "codegen"].map(|field| value[field].clone())
        };
        let new = key(&serde_json::to_value(line)?);
        let mut lines: Vec<String> = Vec::new();
        for line in old.lines() {
            if key(&serde_json::from_str(line)?) != new {
                lines.push(line.to_owned());
            }
        }
        lines.push(serde_json::to_string(line)?);
        fs::write(path, lines.join("\n") + "\n")
    }
}

fn cell(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.decimals$}"))
}

/// Rounds to four decimals: no figure is more precise than that.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}
