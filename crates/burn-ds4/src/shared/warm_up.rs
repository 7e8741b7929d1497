//! What is compiled before requests are answered.

use ds4_model::generate::{
    Constraint, ConstraintError, Engine, EngineConfig, GenerateError, Request, SamplingConfig,
};
use ds4_model::model::Model;

/// Tokens by which a text is longer than those after which a step is recorded.
const TOKENS: usize = 8;
/// Rows of a step or of a call over prompts up to which kernels are those of decode steps.
const STEP_ROWS: usize = 16;
/// Rows of a call over prompts from which on each is searched by a small cube.
const MANY_ROWS: usize = 1024;
/// The longest context, unless another is given: tables for longer ones take long.
const LONGEST: usize = 131_072;
/// Steps of texts whose kernels alone count.
const FEW: usize = 3;
/// Numbers of log-probabilities that are listed: the largest of each power of two, up to the most.
const LISTED: [usize; 6] = [0, 2, 4, 8, 16, 20];

/// Texts whose kernels the first requests would otherwise wait for: those of any chunk of a prompt,
/// of contexts of every size, of every number of lanes, and of tokens that are chosen in every way.
/// First comes what most requests need. CubeCL compiles one kernel after the other for a device,
/// whatever thread launches it, so that this has one thread.
pub struct WarmUp<'a> {
    model: &'a Model,
    config: EngineConfig,
    /// Of which this many are over.
    rounds: Vec<Round>,
    over: usize,
    /// What runs the next round, or is at it.
    engine: Option<(Engine<'a>, Option<usize>)>,
}

impl<'a> WarmUp<'a> {
    /// For an engine of this configuration.
    pub fn new(model: &'a Model, config: &EngineConfig) -> Self {
        let most = model.config().max_position_embeddings;
        let ctx = config.context.unwrap_or(LONGEST).min(most);
        Self {
            model,
            config: config.clone(),
            rounds: rounds(config, ctx),
            over: 0,
            engine: None,
        }
    }

    /// Takes a step with the texts of a round. Returns whether all rounds are over.
    pub fn step(&mut self) -> Result<bool, GenerateError> {
        let Some(round) = self.rounds.get(self.over) else {
            self.give_memory_back();
            return Ok(true);
        };
        let drawn = round.drawn;
        if self.engine.as_ref().is_some_and(|(_, own)| *own != drawn) {
            self.give_memory_back();
        }
        let round = &self.rounds[self.over];
        if self.engine.is_none() {
            let engine = Engine::new(self.model, self.config.clone())?;
            let engine = match drawn {
                Some(processed) => engine.with_random_contexts(processed),
                None => engine,
            };
            self.engine = Some((engine, drawn));
        }
        let (engine, _) = self.engine.as_mut().expect("it was made");
        if engine.is_idle() {
            for index in 0..round.texts {
                let request = round.request(index, self.model.config().bos_token_id);
                match engine.add(request) {
                    // Nor is there for a request.
                    Ok(_) | Err(GenerateError::CacheMemory { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        if !engine.is_idle() {
            engine.step()?;
        }
        self.over += usize::from(engine.is_idle());
        Ok(false)
    }
}

/// What the server does beside it.
#[cfg(any(feature = "protocols", test))]
impl WarmUp<'_> {
    /// How many rounds are over, and of how many.
    pub fn progress(&self) -> (usize, usize) {
        (self.over, self.rounds.len())
    }

    /// Gives back the memory of the texts. Their round begins anew with the next step.
    pub fn pause(&mut self) {
        self.give_memory_back();
    }
}

impl WarmUp<'_> {
    fn give_memory_back(&mut self) {
        if let Some((engine, _)) = self.engine.take() {
            engine.give_memory_back();
        }
    }
}

impl Drop for WarmUp<'_> {
    fn drop(&mut self) {
        self.give_memory_back();
    }
}

/// Texts that are continued side by side.
#[derive(Clone, Debug, Default)]
struct Round {
    texts: usize,
    /// Tokens of a prompt. The second text has one less, so that sequences are padded.
    length: usize,
    tokens: usize,
    sampling: SamplingConfig,
    is_constrained: bool,
    log_probs: Option<usize>,
    /// Tokens of a prompt that are processed, where rows before are drawn at random.
    drawn: Option<usize>,
}

impl Round {
    fn request(&self, index: usize, token: u32) -> Request {
        let length = (self.length - usize::from(index == 1)).max(1);
        let constraint = || -> Box<dyn Constraint> { Box::new(Any) };
        Request {
            ignore_eos: true,
            sampling: self.sampling.clone(),
            constraint: self.is_constrained.then(constraint),
            log_probs: self.log_probs,
            ..Request::new(&vec![token; length], self.tokens)
        }
    }
}

/// What is run, in a context of so many positions.
fn rounds(config: &EngineConfig, ctx: usize) -> Vec<Round> {
    let recorded = TOKENS + config.recording_tokens() + 2 * config.lanes;
    let recorded = recorded.min(ctx / 2).max(1);
    let longest = ctx.saturating_sub(recorded).max(1);
    let alone = |length| Round {
        texts: 1,
        length,
        tokens: 1,
        ..Round::default()
    };
    let fitting = |lengths: Vec<usize>| {
        let mut lengths: Vec<usize> = lengths.iter().map(|own| longest.min(*own)).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths.into_iter().map(alone)
    };
    let mut rounds = Vec::new();
    // A chunk may end among the tokens that are processed: most of them are in one.
    for (least, drawn) in [(STEP_ROWS, STEP_ROWS + 1), (MANY_ROWS, 2 * MANY_ROWS)] {
        let contexts = contexts(ctx).into_iter().filter(|own| *own > least);
        rounds.extend(fitting(contexts.collect()).map(|round| Round {
            drawn: Some(drawn),
            ..round
        }));
    }
    let lanes = std::iter::successors(Some(1), |lanes| Some(2 * lanes));
    let lanes = lanes.take_while(|lanes| *lanes < config.lanes);
    for texts in lanes.chain([config.lanes]) {
        let own = Round {
            texts,
            length: (STEP_ROWS + 1).min(longest),
            tokens: FEW.min(recorded),
            ..Round::default()
        };
        let drawn = SamplingConfig {
            temperature: 1.0,
            top_p: 0.95,
            ..SamplingConfig::default()
        };
        let penalised = SamplingConfig {
            presence_penalty: 1.0,
            ..drawn.clone()
        };
        // Prompts that are processed together, and steps that are recorded.
        let together = (STEP_ROWS / texts + 1).min(longest);
        rounds.push(Round {
            length: together,
            tokens: recorded,
            ..own.clone()
        });
        // With log-probabilities, logits are needed afterwards, and not written over.
        for (is_constrained, log_probs) in [(false, None), (true, None), (true, Some(2))] {
            for sampling in [&own.sampling, &drawn, &penalised] {
                rounds.push(Round {
                    sampling: sampling.clone(),
                    is_constrained,
                    log_probs,
                    ..own.clone()
                });
            }
        }
        rounds.extend(LISTED.map(|listed| Round {
            log_probs: Some(listed),
            ..own.clone()
        }));
    }
    rounds.extend(fitting(lengths(config.prefill_chunk)));
    // Each engine draws as many.
    rounds.sort_by_key(|round| (round.drawn, round.texts));
    rounds
}

/// Lengths of prompts whose chunks need all kernels that any chunk does. How a chunk is processed
/// depends on how long it is, in steps that grow with it, since products have as many columns as
/// cost the least, and on the powers of two that divide it.
fn lengths(chunk: usize) -> Vec<usize> {
    let every = |step: usize, most: usize| (step..=most).step_by(step);
    let powers = std::iter::successors(Some(STEP_ROWS), |power| Some(2 * power));
    let aligned = powers
        .take_while(|power| *power < chunk)
        .flat_map(|power| [1, 2, 4].map(|more| power + more));
    let steps = every(1, STEP_ROWS)
        .chain(every(8, 128))
        .chain(every(16, 256))
        .chain(every(32, 512))
        .chain(every(64, 1024))
        .chain(every(128, chunk));
    let short = steps.chain(aligned).filter(|length| *length <= chunk);
    // A prompt's last token is a part of its first step. The next chunks of a long prompt.
    let short = short.map(|length| length + 1);
    short
        .chain([chunk + 1, 2 * chunk + STEP_ROWS + 2])
        .collect()
}

/// Lengths of texts whose caches need all kernels that those of any text do: how rows are searched
/// depends on how many there are, by powers of two, and on the powers of two that divide them.
fn contexts(ctx: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(4 * STEP_ROWS), |power| Some(2 * power));
    powers
        .take_while(|power| *power < ctx)
        .flat_map(|power| [0, 1, 2].map(|shift| power + (4 << shift)))
        .collect()
}

/// Allows all tokens.
#[derive(Clone, Debug)]
struct Any;

impl Constraint for Any {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        mask.fill(u32::MAX);
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use ds4_model::checkpoint::{Checkpoint, LoadOptions};

    use super::*;
    use crate::shared::shipped_checkpoint;

    #[test]
    fn a_warm_up_goes_on_where_it_was_paused_and_ends() {
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
        let mut warm_up = WarmUp::new(&model, &short);
        let step = |warm_up: &mut WarmUp| warm_up.step().expect("a device that works");
        while warm_up.progress().0 < 3 {
            assert!(!step(&mut warm_up));
        }
        // The round that had begun begins anew.
        step(&mut warm_up);
        warm_up.pause();
        assert_eq!(warm_up.progress().0, 3);
        while !step(&mut warm_up) {}
        let (over, all) = warm_up.progress();
        assert!(over == all && all > 10, "{over} of {all}");
        assert!(step(&mut warm_up), "it stays over");
    }

    #[test]
    fn what_most_requests_need_comes_first() {
        let config = EngineConfig {
            lanes: 4,
            ..EngineConfig::default()
        };
        let rounds = rounds(&config, 4096);
        assert!(rounds[0].texts == 1 && rounds[0].tokens > TOKENS);
        let drawn: Vec<_> = rounds.iter().map(|round| round.drawn).collect();
        assert!(drawn.is_sorted(), "each engine is made once");
    }

    #[test]
    fn every_length_of_a_chunk_has_a_like() {
        for chunk in [1, 16, 17, 100, 256, 2048] {
            let lengths: Vec<usize> = lengths(chunk).iter().map(|own| own - 1).collect();
            for length in 1..=chunk {
                let alike = |other: &usize| {
                    let class = |n: usize| (n.next_power_of_two(), n.trailing_zeros().min(2));
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
