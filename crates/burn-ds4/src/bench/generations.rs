//! Whole generations, with and without drafts.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use ds4_model::generate::{GenerateConfig, Generation, SamplingConfig, TextTokenizer};
use ds4_model::model::Model;
use serde_json::json;

use crate::bench::calls::Timings;
use crate::bench::decoding::{Drafts, append_line};

/// Generations of which the median is taken, after one that does not count.
const GENERATIONS: usize = 5;
const PROMPT: &str = "And God said,";

/// How a text is generated.
#[derive(Clone, Copy)]
struct Kind {
    drafts: Drafts,
    graphs: bool,
    /// Whether tokens are drawn, or are the most likely ones.
    sampled: bool,
}

impl Kind {
    fn options(&self, tokens: usize) -> GenerateConfig {
        GenerateConfig {
            max_new_tokens: tokens,
            drafts: self.drafts.count,
            draft_confidence: self.drafts.confidence,
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

    fn choice(&self) -> &'static str {
        match self.sampled {
            true => "sampled",
            false => "greedy",
        }
    }

    fn graph(&self) -> &'static str {
        match self.graphs {
            true => "recorded",
            false => "launched",
        }
    }

    fn name(&self) -> String {
        let Drafts { count, confidence } = self.drafts;
        let confidence = match confidence > 0.0 {
            true => format!(" above {confidence}"),
            false => String::new(),
        };
        let (choice, graph) = (self.choice(), self.graph());
        format!("{choice}, {graph}, {count} drafts{confidence}")
    }
}

/// What came of one kind of text.
#[derive(Clone, Default)]
struct Rates {
    tokens_per_second: Vec<f64>,
    acceptance: f64,
    replays: usize,
}

/// Texts to generate.
pub struct Texts<'a> {
    pub model: &'a Model,
    pub checkpoint: &'a Path,
    /// Tokens of each.
    pub tokens: usize,
    /// Ways to draft.
    pub drafts: Vec<Drafts>,
    /// Where lines of JSON go.
    pub jsonl: Option<&'a Path>,
}

impl Texts<'_> {
    /// Prints tokens a second: greedy and sampled, without drafts and in each way to draft,
    /// recorded; and launched without drafts and in the first way.
    pub fn measure(&self) -> Result<(), Box<dyn Error>> {
        let tokenizer = TextTokenizer::from_dir(self.checkpoint)?;
        let mut prompt = vec![self.model.config().bos_token_id];
        prompt.extend(tokenizer.encode(PROMPT)?);
        let kinds = self.kinds();
        let mut rates = vec![Rates::default(); kinds.len()];
        for round in 0..=GENERATIONS {
            for (kind, rates) in kinds.iter().zip(&mut rates) {
                let options = kind.options(self.tokens);
                let mut generation = Generation::new(self.model, options, &prompt)?;
                generation.prefill()?;
                let start = Instant::now();
                let tokens = generation.by_ref().collect::<Result<Vec<_>, _>>()?.len();
                let seconds = start.elapsed().as_secs_f64();
                if round > 0 {
                    // The first token comes with the prompt.
                    let rate = (tokens - 1) as f64 / seconds;
                    rates.tokens_per_second.push(rate);
                }
                rates.acceptance = generation.stats().acceptance();
                rates.replays = generation.replays();
            }
        }
        println!("generate                              tokens/s  replays  drafts accepted");
        for (kind, rates) in kinds.iter().zip(rates) {
            let rate = Timings::new(rates.tokens_per_second).median();
            println!(
                "{:<36} {rate:>9.1} {:>8} {:>14.1} %",
                kind.name(),
                rates.replays,
                100.0 * rates.acceptance
            );
            if let Some(file) = self.jsonl {
                let mut line = kind.drafts.json(self.model);
                let name = self.checkpoint.file_name().unwrap_or_default();
                for (key, value) in [
                    ("model", json!(name.to_string_lossy())),
                    (
                        "kind",
                        json!(format!("{}, {}", kind.choice(), kind.graph())),
                    ),
                    ("tokens", json!(self.tokens)),
                    ("tokens_per_second", json!(rate)),
                    ("accepted", json!(rates.acceptance)),
                ] {
                    line[key] = value;
                }
                append_line(file, &line)?;
            }
        }
        Ok(())
    }

    fn kinds(&self) -> Vec<Kind> {
        let ways = [&[Drafts::default()], &self.drafts[..]].concat();
        let kind = |(graphs, sampled)| {
            let launched = if graphs { ways.len() } else { 2 };
            let ways = ways.iter().take(launched);
            ways.map(move |&drafts| Kind {
                drafts,
                graphs,
                sampled,
            })
        };
        let kinds = [(true, false), (false, false), (true, true)];
        kinds.into_iter().flat_map(kind).collect()
    }
}
