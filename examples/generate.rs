//! Continues a text with a checkpoint, in a few lines of the Rust API of `ds4-model`.
//!
//!     cargo run --release -p ds4-model --example generate -- 'And God said,'
//!
//! The program `burn-ds4 generate` has options, drafts and conversations on top.

use std::error::Error;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;

use burn_ds4_ops::device::DeviceSpec;
use ds4_model::generate::{GenerateConfig, SamplingConfig};
use ds4_model::pipeline::Pipeline;

fn main() -> Result<(), Box<dyn Error>> {
    let prompt = std::env::args().nth(1);
    let prompt = prompt.unwrap_or_else(|| "And it came to pass".into());
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/ds4-tiny");

    let device = DeviceSpec::best().init()?;
    let pipeline = Pipeline::open(&checkpoint, &device)?;
    let config = GenerateConfig {
        max_new_tokens: 48,
        sampling: SamplingConfig {
            temperature: 0.7,
            seed: 1,
            ..SamplingConfig::default()
        },
        ..pipeline.defaults.clone()
    };
    let ids = pipeline.encode(&prompt)?;

    let mut out = io::stdout();
    write!(out, "{prompt}")?;
    let mut text = pipeline.generate(config, &ids)?;
    text.stream(
        |piece| match write!(out, "{piece}").and_then(|()| out.flush()) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        },
    )?;
    writeln!(out)?;
    Ok(())
}
