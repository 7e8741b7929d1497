//! Chooses the measurements that one chart shows.

use std::collections::BTreeSet;

use crate::error::Error;
use crate::input::{Located, Measurement};

/// The values to show where the input has several.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// The code generator.
    pub codegen: Option<String>,
    /// The element type.
    pub dtype: Option<String>,
}

/// Returns the measurements of one operator with one code generator and one element type.
///
/// # Errors
/// No measurements, one whose result was wrong, several operators, or several code generators or
/// element types without `wanted` naming one that occurs.
pub fn select(
    measurements: Located<Measurement>,
    wanted: &Wanted,
) -> Result<Located<Measurement>, Error> {
    // This includes measurements that are not shown: no figures of a file with a wrong result
    // should be published.
    if let Some((location, _)) = measurements.iter().find(|(_, m)| !m.verified) {
        return Err(Error::Unverified(location.clone()));
    }
    let measurements = keep_one(measurements, "op", None, |m| &m.op)?;
    let measurements = keep_one(measurements, "codegen", wanted.codegen.as_deref(), |m| {
        m.codegen.as_deref().unwrap_or("null")
    })?;
    let measurements = keep_one(measurements, "dtype", wanted.dtype.as_deref(), |m| &m.dtype)?;
    if measurements.iter().all(|(_, m)| m.us.is_none()) {
        return Err(Error::NoTimes);
    }
    Ok(measurements)
}

fn keep_one(
    mut measurements: Located<Measurement>,
    field: &'static str,
    wanted: Option<&str>,
    value: impl Fn(&Measurement) -> &str,
) -> Result<Located<Measurement>, Error> {
    let found: BTreeSet<_> = measurements
        .iter()
        .map(|(_, m)| value(m).to_string())
        .collect();
    let values = || found.iter().cloned().collect();
    match wanted {
        Some(wanted) if found.contains(wanted) => measurements.retain(|(_, m)| value(m) == wanted),
        Some(wanted) => {
            return Err(Error::Missing {
                field,
                wanted: wanted.to_string(),
                values: values(),
            });
        }
        None if found.len() > 1 => {
            let advice = match field {
                "op" => "a chart shows one operator".to_string(),
                _ => format!("choose one with --{field}"),
            };
            return Err(Error::Several {
                field,
                values: values(),
                advice,
            });
        }
        None => {}
    }
    Ok(measurements)
}
