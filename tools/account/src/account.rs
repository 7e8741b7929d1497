//! Adds up the launches of one step by kernel.

use crate::error::Error;
use crate::profile::Launch;

/// How the launches of the step are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Span {
    /// The launches between the last two launches of this kernel.
    Between(String),
    /// The last launches of the profile, this many.
    Last(usize),
}

/// Returns the launches of the step, and how many were profiled before them.
///
/// # Errors
///
/// If the step is not marked twice, there is nothing between the marks, or there are too few
/// launches.
pub fn step<'l>(launches: &'l [Launch], span: &Span) -> Result<(&'l [Launch], usize), Error> {
    match span {
        Span::Between(marker) => {
            let marks = (0..launches.len()).rev();
            let mut marks = marks.filter(|index| launches[*index].kernel == *marker);
            let (Some(last), first) = (marks.next(), marks.next()) else {
                return Err(unmarked(marker, 0));
            };
            let first = first.ok_or_else(|| unmarked(marker, 1))?;
            if first + 1 == last {
                return Err(Error::NoStep);
            }
            Ok((&launches[first + 1..last], first + 1))
        }
        Span::Last(wanted) => {
            let before = launches.len().checked_sub(*wanted);
            let before = before.ok_or(Error::TooFew {
                wanted: *wanted,
                found: launches.len(),
            })?;
            if *wanted == 0 {
                return Err(Error::NoStep);
            }
            Ok((&launches[before..], before))
        }
    }
}

fn unmarked(marker: &str, found: usize) -> Error {
    Error::Unmarked {
        marker: marker.to_owned(),
        found,
    }
}

/// The launches in one line of the account.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Their kernel.
    pub kernel: String,
    /// The number of launches.
    pub launches: usize,
    /// Microseconds of all of them.
    pub us: f64,
    /// Bytes that all of them moved.
    pub bytes: f64,
}

impl Line {
    fn add(&mut self, launch: &Launch) {
        self.launches += 1;
        self.us += launch.us;
        self.bytes += launch.bytes;
    }

    fn of(kernel: &str) -> Self {
        Self {
            kernel: kernel.to_owned(),
            launches: 0,
            us: 0.0,
            bytes: 0.0,
        }
    }

    /// Adds up all lines.
    pub fn total(lines: &[Self]) -> Self {
        lines.iter().fold(Self::of("total"), |total, line| Self {
            launches: total.launches + line.launches,
            us: total.us + line.us,
            bytes: total.bytes + line.bytes,
            ..total
        })
    }
}

/// Returns a line for each run of neighbouring launches of one kernel, in their order.
pub fn in_order(launches: &[Launch]) -> Vec<Line> {
    let runs = launches.chunk_by(|one, next| one.kernel == next.kernel);
    runs.map(|run| {
        let mut line = Line::of(&run[0].kernel);
        run.iter().for_each(|launch| line.add(launch));
        line
    })
    .collect()
}

/// Returns a line for each kernel, the one that takes longest first.
pub fn by_kernel(launches: &[Launch]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for launch in launches {
        let known = lines.iter().position(|line| line.kernel == launch.kernel);
        let index = known.unwrap_or(lines.len());
        if known.is_none() {
            lines.push(Line::of(&launch.kernel));
        }
        lines[index].add(launch);
    }
    lines.sort_by(|one, other| other.us.total_cmp(&one.us));
    lines
}
