//! Whole generations, with and without drafts.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use ds4_model::generate::{GenerateConfig, Generation, SamplingConfig, TextTokenizer};
use ds4_model::model::Model;

use crate::calls::Timings;

/// Generations of which the median is taken, after one that does not count.
const GENERATIONS: usize = 5;
const PROMPT: &str = "And God said,";

/// How a text is generated.
struct Kind {
    drafts: usize,
    graphs: bool,
    /// Whether tokens are drawn, or are the most likely ones.
    sampled: bool,
}

impl Kind {
    fn options(&self, tokens: usize) -> GenerateConfig {
        GenerateConfig {
            max_new_tokens: tokens,
            drafts: self.drafts,
            graphs: self.graphs,
            sampling: SamplingConfig {
                temperature: if self.sampled { 0.8 } else { 0.0 },
                top_p: if self.sampled { 0.95 } else { 1.0 },
                ..SamplingConfig::default()
            },
            ignore_eos: true,
            ..GenerateConfig::default()
        }
    }

    fn name(&self) -> String {
        let choice = if self.sampled { "sampled" } else { "greedy" };
        let graph = if self.graphs { "recorded" } else { "launched" };
        format!("{choice}, {graph}, {} drafts", self.drafts)
    }
}

/// Prints tokens a second of a text: greedy and sampled, without drafts and with so many, launched
/// and recorded.
pub fn generations(
    model: &Model,
    checkpoint: &Path,
    tokens: usize,
    drafts: usize,
) -> Result<(), Box<dyn Error>> {
    let tokenizer = TextTokenizer::from_dir(checkpoint)?;
    let mut prompt = vec![model.config().bos_token_id];
    prompt.extend(tokenizer.encode(PROMPT)?);
    let mut kinds = Vec::new();
    for sampled in [false, true] {
        for drafts in [0, drafts] {
            kinds.extend([false, true].map(|graphs| Kind {
                drafts,
                graphs,
                sampled,
            }));
        }
    }
    let mut rates = vec![Vec::new(); kinds.len()];
    let mut outcomes = vec![(0.0, 0); kinds.len()];
    for round in 0..=GENERATIONS {
        for (index, kind) in kinds.iter().enumerate() {
            let mut generation = Generation::new(model, kind.options(tokens), &prompt)?;
            generation.prefill()?;
            let start = Instant::now();
            let tokens = generation.by_ref().collect::<Result<Vec<_>, _>>()?.len();
            let seconds = start.elapsed().as_secs_f64();
            if round > 0 {
                // The first token comes with the prompt.
                rates[index].push((tokens - 1) as f64 / seconds);
            }
            outcomes[index] = (generation.stats().acceptance(), generation.replays());
        }
    }
    println!("generate                      tokens/s  replays  drafts accepted");
    for ((kind, rates), (acceptance, replays)) in kinds.iter().zip(rates).zip(outcomes) {
        println!(
            "{:<28} {:>9.1} {replays:>8} {:>14.1} %",
            kind.name(),
            Timings::new(rates).median(),
            100.0 * acceptance
        );
    }
    Ok(())
}
