//! Writes a checkpoint in another form: shard by shard, each under its name when it is whole, and
//! the index last. A conversion that was interrupted goes on where it was.

use std::error::Error;
use std::path::PathBuf;

use burn_ds4_ops::device::DeviceSpec;
use clap::{Args, ValueEnum};
use ds4_model::checkpoint::{Checkpoint, Form, LoadOptions};

use crate::shared::load_bar::LoadBar;
use crate::shared::shipped_checkpoint;

/// Writes a checkpoint in another form, which gives the same logits.
///
/// Nothing is overwritten. The same command goes on with a conversion that was interrupted.
#[derive(Debug, Args)]
pub struct Options {
    /// Directory of the checkpoint.
    #[arg(short, long, default_value_os_t = shipped_checkpoint())]
    model: PathBuf,
    /// What to write.
    #[arg(long)]
    to: To,
    /// Bytes of a shard, in MB.
    #[arg(long, value_name = "MB", default_value_t = 5000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    shard_size: u32,
    /// Directory to write to, which is new, empty, or has a part of the same conversion.
    target: PathBuf,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum To {
    /// Names and formats of the release. NVFP4 becomes FP4 where that is exact, and F32 elsewhere.
    Released,
    /// Names of the release and no packed weight: BF16 where that is exact, and F32 elsewhere.
    Dense,
    /// Names of the modules of Hugging Face transformers, all experts of a layer in one tensor.
    Hf,
}

/// Runs the program.
///
/// # Errors
///
/// If the checkpoint cannot be loaded, or the target not be written.
pub fn run(args: &Options) -> Result<(), Box<dyn Error>> {
    let checkpoint = Checkpoint::open(&args.model)?;
    // Nothing is written of what would not load.
    checkpoint.weight_bytes(&LoadOptions::default(), &DeviceSpec::Flex.init()?)?;
    let form = match args.to {
        To::Released => Form::Released,
        To::Dense => Form::Dense,
        To::Hf => Form::Transformers,
    };
    let shard_bytes = args.shard_size as usize * 1_000_000;
    checkpoint.convert(form, &args.target, shard_bytes, LoadBar::default())?;
    Ok(())
}
