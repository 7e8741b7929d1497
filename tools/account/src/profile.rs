//! Parses the output of `ncu --csv`: a line for each metric of each launch.

use crate::csv::fields;
use crate::error::Error;

/// Time of a launch.
pub const DURATION: &str = "gpu__time_duration.sum";
/// Bytes that it reads from memory.
pub const READ: &str = "dram__bytes_read.sum";
/// Bytes that it writes to memory.
pub const WRITTEN: &str = "dram__bytes_write.sum";

const COLUMNS: [&str; 5] = [
    "ID",
    "Kernel Name",
    "Metric Name",
    "Metric Unit",
    "Metric Value",
];

/// One launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The function, without the parameters that its kernel was compiled for.
    pub kernel: String,
    /// Microseconds.
    pub us: f64,
    /// Bytes that were read from memory or written to it.
    pub bytes: f64,
}

/// A launch whose metrics are being collected.
struct Metrics {
    id: String,
    kernel: String,
    us: Option<f64>,
    read: Option<f64>,
    written: Option<f64>,
}

impl Metrics {
    fn launch(self) -> Result<Launch, Error> {
        let missing = |metric| Error::MissingMetric {
            id: self.id.clone(),
            kernel: self.kernel.clone(),
            metric,
        };
        let read = self.read.ok_or_else(|| missing(READ))?;
        let written = self.written.ok_or_else(|| missing(WRITTEN))?;
        Ok(Launch {
            us: self.us.ok_or_else(|| missing(DURATION))?,
            bytes: read + written,
            kernel: self.kernel,
        })
    }
}

/// Parses the launches in their order. Skips what ncu and the program print before the columns, and
/// metrics that are not needed.
///
/// # Errors
///
/// If there are no columns or launches, a line is truncated, a value is no number or has another
/// unit, or a launch lacks a metric.
pub fn parse(text: &str) -> Result<Vec<Launch>, Error> {
    let mut lines = (1..).zip(text.lines());
    let columns = lines.find_map(|(_, line)| columns(line));
    let Some(columns) = columns else {
        let columns = COLUMNS.to_vec();
        return Err(Error::NoHeader { columns });
    };
    let mut launches: Vec<Metrics> = Vec::new();
    for (line, text) in lines {
        // ncu prints messages in between.
        if text.trim().is_empty() || text.starts_with("==") {
            continue;
        }
        let malformed = |problem: String| Error::Malformed { line, problem };
        let fields = fields(text).ok_or_else(|| malformed("a quote is not closed".into()))?;
        let field = |column: usize| {
            let index = columns[column];
            let field = fields.get(index).map(String::as_str);
            field.ok_or_else(|| malformed(format!("there is no {}", COLUMNS[column])))
        };
        let (id, kernel) = (field(0)?, function_name(field(1)?));
        if launches.last().is_none_or(|launch| launch.id != id) {
            launches.push(Metrics {
                id: id.to_owned(),
                kernel: kernel.to_owned(),
                us: None,
                read: None,
                written: None,
            });
        }
        let Some(launch) = launches.last_mut() else {
            continue;
        };
        let (unit, value) = (field(3)?, field(4)?);
        let scaled = |units: &[(&str, f64)]| scaled(value, unit, units).map_err(malformed);
        match field(2)? {
            DURATION => launch.us = Some(scaled(&TIMES)?),
            READ => launch.read = Some(scaled(&SIZES)?),
            WRITTEN => launch.written = Some(scaled(&SIZES)?),
            _ => {}
        }
    }
    if launches.is_empty() {
        return Err(Error::Empty);
    }
    launches.into_iter().map(Metrics::launch).collect()
}

/// The index of each column, if the line names them.
fn columns(line: &str) -> Option<[usize; 5]> {
    let fields = fields(line)?;
    let mut indices = [0; 5];
    for (index, column) in indices.iter_mut().zip(COLUMNS) {
        *index = fields.iter().position(|field| field == column)?;
    }
    Some(indices)
}

/// Factors that convert a unit to microseconds.
const TIMES: [(&str, f64); 8] = [
    ("nsecond", 1e-3),
    ("ns", 1e-3),
    ("usecond", 1.0),
    ("us", 1.0),
    ("msecond", 1e3),
    ("ms", 1e3),
    ("second", 1e6),
    ("s", 1e6),
];
const SIZES: [(&str, f64); 4] = [
    ("byte", 1.0),
    ("Kbyte", 1e3),
    ("Mbyte", 1e6),
    ("Gbyte", 1e9),
];

fn scaled(value: &str, unit: &str, units: &[(&str, f64)]) -> Result<f64, String> {
    let known = units.iter().find(|(name, _)| *name == unit);
    let (_, factor) = known.ok_or_else(|| {
        let names: Vec<&str> = units.iter().map(|(name, _)| *name).collect();
        format!("the unit is {unit:?}, not one of {}", names.join(", "))
    })?;
    let number = value.replace(',', "").parse::<f64>();
    match number {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number * factor),
        _ => Err(format!("{value:?} is not a measurement")),
    }
}

/// Scalar types as they appear in kernel names.
const TYPES: [&str; 17] = [
    "f16", "bf16", "f32", "flex32", "tf32", "f64", "e4m3", "e5m2", "i8", "i16", "i32", "i64", "u8",
    "u16", "u32", "u64", "bool",
];

/// The function in a kernel's name, without the parameters that it was compiled for.
///
/// CubeCL appends names and values of generic parameters, and a hash:
/// `rms_norm_kernel_f_f32_w_f32_n_4_1c2d3e4f`. The function ends with the word `kernel`. A name
/// without that word ends before the name of the first parameter that is a type.
pub fn function_name(kernel: &str) -> &str {
    // Kernels from other sources have a signature here.
    let kernel = kernel.split(['(', '<']).next().unwrap_or(kernel);
    let is_hash = |word: &str| word.len() == 8 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let named = match kernel.rsplit_once('_') {
        Some((name, hash)) if is_hash(hash) => name,
        _ => kernel,
    };
    let mut end = 0;
    let mut before = 0;
    for word in named.split('_') {
        let from = end;
        end += word.len();
        if word == "kernel" && from > 0 {
            return &named[..end];
        }
        if TYPES.contains(&word) && before > 0 {
            return &named[..before];
        }
        // The underscore before the word is not part of what ends there.
        before = from.saturating_sub(1);
        end += 1;
    }
    named
}
