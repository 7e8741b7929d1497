//! The command line of the chart tool.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ds4_chart::chart::Chart;
use ds4_chart::error::Error;
use ds4_chart::recall::{self, Recall};
use ds4_chart::select::{Wanted, select};
use ds4_chart::{input, svg, table};

/// Draws benchmark results of one operator against the best peer and the memory's floor, and prints
/// them as a Markdown table.
#[derive(Parser)]
#[command(
    name = "ds4-chart",
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Lines of the benchmark program
    #[arg(required = true)]
    measurements: Vec<PathBuf>,
    /// Lines of the best existing kernels
    #[arg(long)]
    peers: Option<PathBuf>,
    /// The SVG to write
    #[arg(long, required = true)]
    out: Option<PathBuf>,
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

#[derive(Subcommand)]
enum Command {
    /// Draws the recall of a clustered output head over the clusters that it probes, and prints it
    /// as a Markdown table
    Recall {
        /// The output of `eval --flash-head --json`
        evaluation: PathBuf,
        /// The SVG to write
        #[arg(long)]
        out: PathBuf,
        /// The model that the title names
        #[arg(long, default_value = "ds4-tiny")]
        model: String,
    },
}

fn run(args: Args) -> Result<String, Error> {
    if let Some(Command::Recall {
        evaluation,
        out,
        model,
    }) = args.command
    {
        let text = fs::read_to_string(&evaluation).map_err(|source| Error::Read {
            file: evaluation.clone(),
            source,
        })?;
        let recall = Recall::parse(&evaluation, &text)?;
        write(out, recall::draw(&recall, &model)?)?;
        return Ok(recall.markdown());
    }
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
    // The command line requires it.
    write(args.out.unwrap_or_default(), drawing)?;
    Ok(table::markdown(&chart))
}

fn write(file: PathBuf, drawing: String) -> Result<(), Error> {
    fs::write(&file, drawing).map_err(|source| Error::Write { file, source })
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
