//! What is compiled before requests are answered.

use ds4_model::generate::{Engine, EngineConfig, GenerateError, Request, SamplingConfig};
use ds4_model::model::Model;

/// Tokens by which a text is longer than those after which a step is recorded.
const TOKENS: usize = 8;
/// The shortest prompt that is processed as a prompt, not as a decode step.
const SHORTEST: usize = 17;

/// Compiles the kernels of prompts and steps, which otherwise the first requests would wait for:
/// those of any chunk of a prompt, of every number of lanes, and of tokens that are the most likely
/// ones or drawn. CubeCL compiles one kernel after the other for a device, whatever thread launches
/// it, so that this has one thread. `tell` is told after each step how many texts have ended, of
/// how many, and says whether to go on. Returns how many have ended.
pub fn warm_up(
    model: &Model,
    config: &EngineConfig,
    tell: &mut dyn FnMut(usize, usize) -> bool,
) -> Result<usize, GenerateError> {
    let mut engine = Engine::new(model, config.clone())?;
    let most = model.config().max_position_embeddings;
    let ctx = config.context.map_or(most, |context| context.min(most));
    // The last of the texts must join before the first one ends.
    let tokens = TOKENS + config.recording_tokens() + 2 * config.lanes;
    let tokens = tokens.min(ctx / 2).max(1);
    let longest = ctx.saturating_sub(tokens).max(1);
    let mut lengths: Vec<usize> = lengths(config.prefill_chunk)
        .map(|length| length.min(longest))
        .collect();
    // Of a short context, many are the same.
    lengths.sort_unstable();
    lengths.dedup();
    let drawn = SamplingConfig {
        temperature: 1.0,
        top_p: 0.95,
        ..SamplingConfig::default()
    };
    let few = [SHORTEST.min(longest)];
    let kinds = [(&lengths[..], SamplingConfig::default()), (&few, drawn)];
    let texts = kinds.each_ref().map(|kind| kind.0.len().max(config.lanes));
    let (all, mut done) = (texts.iter().sum::<usize>(), 0);
    for ((lengths, sampling), texts) in kinds.into_iter().zip(texts) {
        for length in lengths.iter().cycle().take(texts) {
            engine.add(Request {
                ignore_eos: true,
                sampling: sampling.clone(),
                ..Request::new(&vec![model.config().bos_token_id; *length], tokens)
            })?;
        }
        while !engine.is_idle() {
            if !tell(done, all) {
                return Ok(done);
            }
            let outputs = engine.step()?;
            done += outputs
                .iter()
                .filter(|output| output.finish.is_some())
                .count();
        }
    }
    Ok(done)
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
    use ds4_model::checkpoint::{Checkpoint, LoadOptions};

    use super::*;
    use crate::shared::shipped_checkpoint;

    #[test]
    fn a_warm_up_ends_by_itself_and_at_once_when_it_is_told_to() {
        let checkpoint = Checkpoint::open(&shipped_checkpoint()).expect("an asset");
        let options = LoadOptions {
            expand: true,
            ..LoadOptions::default()
        };
        let device = burn_ds4_ops::device::DeviceSpec::Flex;
        let device = device.init().expect("it is always present");
        let model = checkpoint.load(&options, &device).expect("an asset");
        let config = EngineConfig {
            lanes: 2,
            prefill_chunk: 20,
            ..EngineConfig::default()
        };
        // A context that leaves little to the texts.
        let short = EngineConfig {
            context: Some(40),
            ..config.clone()
        };
        let ended = warm_up(&model, &short, &mut |_, _| true).expect("a device that works");
        assert!(ended > 2, "{ended}");
        let ended = warm_up(&model, &config, &mut |_, _| false).expect("a device that works");
        assert_eq!(ended, 0);
    }

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
