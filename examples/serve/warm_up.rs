//! What a server compiles before it is ready.

use ds4_model::generate::{Engine, EngineConfig, GenerateError, Request, SamplingConfig};
use ds4_model::model::Model;

/// Tokens of a text: enough to launch, record and replay a step.
const TOKENS: usize = 24;
/// The shortest prompt that is processed as a prompt, not as a decode step.
const SHORTEST: usize = 17;

/// Compiles the kernels of prompts and steps, which otherwise the first requests would wait for:
/// those of any chunk of a prompt, of every number of lanes, and of tokens that are the most likely
/// ones or drawn.
pub fn warm_up(model: &Model, config: &EngineConfig, ctx: usize) -> Result<(), GenerateError> {
    let mut engine = Engine::new(model, config.clone())?;
    // The last of the texts must join before the first one ends.
    let tokens = TOKENS + 2 * config.lanes;
    let longest = ctx.saturating_sub(tokens).max(1);
    let lengths: Vec<usize> = lengths(config.prefill_chunk)
        .map(|length| length.min(longest))
        .collect();
    let drawn = SamplingConfig {
        temperature: 1.0,
        top_p: 0.95,
        ..SamplingConfig::default()
    };
    let few = [SHORTEST.min(longest)];
    for (lengths, sampling) in [(&lengths[..], SamplingConfig::default()), (&few, drawn)] {
        for length in lengths.iter().cycle().take(lengths.len().max(config.lanes)) {
            engine.add(Request {
                ignore_eos: true,
                sampling: sampling.clone(),
                ..Request::new(&vec![model.config().bos_token_id; *length], tokens)
            })?;
        }
        while !engine.is_idle() {
            engine.step()?;
        }
    }
    Ok(())
}

/// Lengths of prompts whose chunks need all kernels that any prompt does. How a chunk is processed
/// depends on how long it is, by powers of two, and on the powers of two that divide it.
fn lengths(chunk: usize) -> impl Iterator<Item = usize> {
    let powers = std::iter::successors(Some(SHORTEST - 1), |power| Some(2 * power));
    let between = powers
        .take_while(move |power| *power < chunk)
        .flat_map(|power| [1, 2, 4, 8, power].map(|more| power + more));
    let short = between.filter(move |length| *length <= chunk);
    // The next chunks of a long prompt, and the end of it as a decode step.
    short.chain([chunk, 2 * chunk + SHORTEST, 4 * chunk + 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_of_a_chunk_has_a_like() {
        for chunk in [1, 16, 17, 100, 256, 2048] {
            let lengths: Vec<usize> = lengths(chunk).collect();
            for length in SHORTEST..=chunk {
                let alike = |other: &usize| {
                    let class = |n: usize| ((n - 1).ilog2(), n.trailing_zeros().min(3));
                    *other <= chunk && class(*other) == class(length)
                };
                assert!(
                    lengths.iter().any(alike),
                    "{length} of chunks of {chunk}: {lengths:?}"
                );
            }
        }
    }
}
