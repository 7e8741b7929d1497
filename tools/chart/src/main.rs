//! The command line of the chart tool.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use ds4_chart::chart::Chart;
use ds4_chart::error::Error;
use ds4_chart::select::{Wanted, select};
use ds4_chart::{input, svg, table};

/// Draws benchmark results of one operator against the best peer and the memory's floor, and prints them as a Markdown table.
#[derive(Parser)]
#[command(name = "ds4-chart")]
struct Args {
    /// Lines of the benchmark program
    #[arg(required = true)]
    measurements: Vec<PathBuf>,
    /// Lines of the best existing kernels
    #[arg(long)]
    peers: Option<PathBuf>,
    /// The SVG to write
    #[arg(long)]
    out: PathBuf,
    /// The code generator to show, if the measurements have several
    #[arg(long)]
    codegen: Option<String>,
    /// The element type to show, if the measurements have several
    #[arg(long)]
    dtype: Option<String>,
    /// The device that the title names
    #[arg(long, default_value = "NVIDIA H200")]
    device: String,
}

fn run(args: Args) -> Result<String, Error> {
    let measurements = input::read(&args.measurements)?;
    let peers = match args.peers {
        Some(file) => input::read(&[file])?,
        None => Vec::new(),
    };
    let wanted = Wanted {
        codegen: args.codegen,
        dtype: args.dtype,
    };
    let chart = Chart::new(&select(measurements, &wanted)?, &peers)?;
    let drawing = svg::draw(&chart, &args.device)?;
    fs::write(&args.out, drawing).map_err(|source| Error::Write {
        file: args.out,
        source,
    })?;
    Ok(table::markdown(&chart))
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(table) => {
            print!("{table}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
