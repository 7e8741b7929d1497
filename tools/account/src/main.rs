//! The command line of the account.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use ds4_account::account::{Span, by_kernel, in_order, step};
use ds4_account::error::Error;
use ds4_account::profile::parse;
use ds4_account::table::{Scale, markdown};

/// Prints the times of the launches of one decode step as a Markdown table, from the output of
/// `ncu --csv`.
#[derive(Parser)]
#[command(name = "ds4-account")]
struct Args {
    /// The output of `ncu --csv --metrics
    /// gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum`
    profile: PathBuf,
    /// The kernel whose last two launches enclose the step
    #[arg(long, default_value = "prng_kernel")]
    marker: String,
    /// Takes this many of the last launches instead
    #[arg(long, conflicts_with = "marker")]
    last: Option<usize>,
    /// Divides the figures by this many layers
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    layers: usize,
    /// The rate of a plain copy, in TB/s
    #[arg(long, default_value_t = 4.3, value_parser = positive)]
    copy_rate: f64,
    /// One row for each kernel, the longest first, in place of one for each run of neighbours
    #[arg(long)]
    by_kernel: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| *number > 0);
    number.ok_or_else(|| "not a number of layers".to_owned())
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|number| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "not a rate".to_owned())
}

fn run(args: Args) -> Result<String, Error> {
    let text = fs::read_to_string(&args.profile).map_err(|source| Error::Read {
        file: args.profile.clone(),
        source,
    })?;
    let launches = parse(&text)?;
    let span = match args.last {
        Some(last) => Span::Last(last),
        None => Span::Between(args.marker),
    };
    let (step, before) = step(&launches, &span)?;
    let lines = match args.by_kernel {
        true => by_kernel(step),
        false => in_order(step),
    };
    let scale = Scale {
        copy_rate: args.copy_rate,
        layers: args.layers,
    };
    let table = markdown(&lines, scale);
    Ok(format!(
        "{table}\n{} launches, and {before} that were profiled before them.\n",
        step.len()
    ))
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
