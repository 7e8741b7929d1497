//! Lines made for the tests.
#![allow(dead_code)]

use std::path::Path;

use ds4_chart::chart::Chart;
use ds4_chart::error::Error;
use ds4_chart::input::{Located, Measurement, Peer, parse};
use ds4_chart::select::{Wanted, select};

/// A measurement of `op` with the given shape (the inside of the JSON object), variant and time.
pub fn ours(shape: &str, variant: &str, us: f64) -> String {
    format!(
        "{{\"op\":\"sort\",\"shape\":{{{shape}}},\"variant\":\"{variant}\",\"dtype\":\"f32\",\
         \"us\":{us},\"eager_us\":30.5,\"gbps\":1200.0,\"share_of_copy\":0.25,\
         \"verified\":true,\"codegen\":\"nvrtc\"}}"
    )
}

/// A peer's line.
pub fn peer(shape: &str, variant: &str, us: f64, floor_us: &str) -> String {
    format!(
        "{{\"op\":\"sort\",\"shape\":{{{shape}}},\"variant\":\"{variant}\",\"us\":{us},\
         \"peer\":\"quick|sort\",\"floor_us\":{floor_us}}}"
    )
}

/// The measurements of `lines`.
pub fn measurements(lines: &[String]) -> Result<Located<Measurement>, Error> {
    parse(Path::new("ours.jsonl"), &lines.join("\n"))
}

/// The chart of `lines` against `peers`.
pub fn chart(lines: &[String], peers: &[String]) -> Result<Chart, Error> {
    let peers: Located<Peer> = parse(Path::new("peers.jsonl"), &peers.join("\n"))?;
    Chart::new(&select(measurements(lines)?, &Wanted::default())?, &peers)
}
