//! Whole generations, with and without drafts.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use ds4_model::generate::{GenerateConfig, Generation, TextTokenizer};
use ds4_model::model::Model;

use crate::calls::Timings;

/// Generations of which the median is taken, after one that does not count.
const GENERATIONS: usize = 5;
const PROMPT: &str = "And God said,";

/// Prints tokens a second of greedy decoding, without and with a draft: launched, and as graphs.
pub fn generations(model: &Model, checkpoint: &Path, tokens: usize) -> Result<(), Box<dyn Error>> {
    let tokenizer = TextTokenizer::from_dir(checkpoint)?;
    let mut prompt = vec![model.config().bos_token_id];
    prompt.extend(tokenizer.encode(PROMPT)?);
    let kinds = [(0, false), (0, true), (1, false), (1, true)];
    let mut rates = vec![Vec::new(); kinds.len()];
    let (mut acceptance, mut replays) = (0.0, 0);
    for round in 0..=GENERATIONS {
        for ((drafts, graphs), rates) in kinds.into_iter().zip(&mut rates) {
            let options = GenerateConfig {
                max_new_tokens: tokens,
                drafts,
                graphs,
                ignore_eos: true,
                ..GenerateConfig::default()
            };
            let mut generation = Generation::new(model, options, &prompt)?;
            generation.prefill()?;
            let start = Instant::now();
            let tokens = generation.by_ref().collect::<Result<Vec<_>, _>>()?.len();
            let seconds = start.elapsed().as_secs_f64();
            if round > 0 {
                // The first token comes with the prompt.
                rates.push((tokens - 1) as f64 / seconds);
            }
            acceptance = generation.stats().acceptance();
            replays = generation.replays();
        }
    }
    let rates: Vec<Timings> = rates.into_iter().map(Timings::new).collect();
    let [launched, plain, launched_drafts, drafts] = [0, 1, 2, 3].map(|kind| rates[kind].median());
    println!(
        "generate: {plain:.1} tokens/s; with --no-graph {launched:.1} tokens/s; with --mtp 1 \
         {drafts:.1} tokens/s ({:.3} times that without it, {replays} steps replayed, {:.1} % of \
         drafts accepted); with both {launched_drafts:.1} tokens/s",
        drafts / plain,
        100.0 * acceptance
    );
    Ok(())
}
