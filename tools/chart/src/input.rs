//! Reads measurements and the figures of peers, one JSON object a line.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, de};

use crate::error::{Error, Location};

/// The sizes of a case, with the names in the tables of results. They keep the order of the file,
/// and are equal in any order.
#[derive(Clone, Debug)]
pub struct Shape(Vec<(String, u64)>);

impl Shape {
    /// The columns and their values, in the order of the file.
    pub fn columns(&self) -> &[(String, u64)] {
        &self.0
    }

    /// The value of a column.
    pub fn get(&self, column: &str) -> Option<u64> {
        let found = self.0.iter().find(|(name, _)| name == column);
        found.map(|&(_, value)| value)
    }

    /// The columns by name.
    pub fn sorted(&self) -> Vec<(&str, u64)> {
        let mut columns: Vec<_> = self
            .0
            .iter()
            .map(|(name, value)| (name.as_str(), *value))
            .collect();
        columns.sort_unstable();
        columns
    }
}

impl PartialEq for Shape {
    fn eq(&self, other: &Self) -> bool {
        self.sorted() == other.sorted()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, value)) in self.0.iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

// By hand, because a derived map would lose the order of the columns, or silently keep the second
// of two equal names.
impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Columns;
        impl<'de> Visitor<'de> for Columns {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of positive integers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shape, A::Error> {
                let mut shape = Shape(Vec::new());
                while let Some((name, value)) = map.next_entry::<String, u64>()? {
                    if value == 0 {
                        return Err(A::Error::custom(format!(
                            "{name} is 0, which a logarithmic axis cannot show"
                        )));
                    }
                    if shape.get(&name).is_some() {
                        return Err(A::Error::custom(format!(
                            "the shape has two columns {name}"
                        )));
                    }
                    shape.0.push((name, value));
                }
                if shape.0.is_empty() {
                    return Err(A::Error::custom("the shape is empty"));
                }
                Ok(shape)
            }
        }
        deserializer.deserialize_map(Columns)
    }
}

/// A time of one of our kernels, as the benchmark program prints it.
#[derive(Clone, Debug, Deserialize)]
pub struct Measurement {
    /// The operator.
    pub op: String,
    /// The sizes.
    pub shape: Shape,
    /// The mode of the operator, where it has several.
    pub variant: String,
    /// The element type.
    pub dtype: String,
    /// Microseconds a call; `None` where only the eager call was timed.
    #[serde(deserialize_with = "time")]
    pub us: Option<f64>,
    /// The bandwidth reached, as a share of a plain copy's.
    #[serde(default)]
    pub share_of_copy: Option<f64>,
    /// Whether the result was verified.
    pub verified: bool,
    /// The code generator that compiled the kernel.
    #[serde(default)]
    pub codegen: Option<String>,
}

/// The best existing kernel for a case.
#[derive(Clone, Debug, Deserialize)]
pub struct Peer {
    /// The operator.
    pub op: String,
    /// The sizes.
    pub shape: Shape,
    /// The mode of the operator, where it has several.
    pub variant: String,
    /// Microseconds a call.
    #[serde(deserialize_with = "some_time")]
    pub us: f64,
    /// The kernel's name.
    pub peer: String,
    /// The least microseconds for moving the bytes, where known.
    #[serde(deserialize_with = "floor")]
    pub floor_us: Option<f64>,
}

// `deserialize_with` also makes the field mandatory: a line without it is damaged, one with `null`
// is not.
fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    match Option::deserialize(deserializer)? {
        Some(us) if us <= 0.0 => Err(de::Error::custom(format!("{us} us is not a time"))),
        us => Ok(us),
    }
}

fn some_time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    time(deserializer)?.ok_or_else(|| de::Error::custom("a peer has no time"))
}

fn floor<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    match Option::deserialize(deserializer)? {
        Some(us) if us < 0.0 => Err(de::Error::custom(format!("{us} us is not a floor"))),
        us => Ok(us),
    }
}

/// Records with the lines they came from.
pub type Located<T> = Vec<(Location, T)>;

/// Parses the records of `text`, which was read from `file`. Skips blank lines.
///
/// # Errors
/// A line that is not a record, by file and line.
pub fn parse<T: DeserializeOwned>(file: &Path, text: &str) -> Result<Located<T>, Error> {
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(i, line)| {
            let location = Location::new(file, i + 1);
            match serde_json::from_str(line) {
                Ok(record) => Ok((location, record)),
                Err(error) => Err(Error::Malformed {
                    location,
                    problem: error.to_string(),
                }),
            }
        })
        .collect()
}

/// The records of all `files`, in order.
///
/// # Errors
/// A file that cannot be read or holds nothing, or a line that is not a record.
pub fn read<T: DeserializeOwned>(files: &[PathBuf]) -> Result<Located<T>, Error> {
    let mut records = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file).map_err(|source| Error::Read {
            file: file.clone(),
            source,
        })?;
        let found = parse(file, &text)?;
        // An empty file is more likely a failed run than intended.
        if found.is_empty() {
            return Err(Error::Empty(file.clone()));
        }
        records.extend(found);
    }
    Ok(records)
}
