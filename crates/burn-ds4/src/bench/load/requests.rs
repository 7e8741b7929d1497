//! The requests of a load: drawn, and the same ones for the same seed.

use std::fmt;
use std::str::FromStr;

use clap::{Args, value_parser};
use ds4_model::generate::{Constraint, ConstraintError, Request, SamplingConfig};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::bench::model::{fraction, positive};

/// Alternatives that a text with log-probabilities has listed.
const LISTED: usize = 5;

/// Options of what texts are like.
#[derive(Clone, Debug, Args)]
pub struct TextArgs {
    /// Tokens of a prompt: a number, or MIN:MAX, of which as many are between 16 and 32 as between
    /// 16384 and 32768.
    #[arg(long, default_value = "8192", value_name = "TOKENS")]
    pub input: Lengths,
    /// Tokens of an answer, which has no other end, in the same way.
    #[arg(long, default_value = "1024", value_name = "TOKENS")]
    pub output: Lengths,
    /// Share of the texts that begin with the same tokens, 0 to 1.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = fraction)]
    shared: f64,
    /// How many tokens these begin with, as far as a prompt has more.
    #[arg(long, default_value_t = 2000, value_name = "TOKENS")]
    shared_tokens: usize,
    /// Share of the texts that may only have some tokens, as answers by a schema, 0 to 1. Which
    /// these are, the host says before each step: here any of even numbers.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = fraction)]
    constrained: f64,
    /// Share of the texts with log-probabilities, of five tokens for each of their own, 0 to 1.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = fraction)]
    log_probs: f64,
    /// Share of the texts whose tokens are drawn, with penalties for half of them, 0 to 1.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = fraction)]
    drawn: f64,
    /// Texts that arrive a second, with random times between them. Without it, a text arrives when
    /// another one ends.
    #[arg(long, value_name = "TEXTS", value_parser = positive)]
    pub rate: Option<f64>,
    /// Selects the texts and when they arrive.
    #[arg(long, default_value_t = 0, value_parser = value_parser!(u64))]
    pub seed: u64,
}

/// Tokens of a text: the least, and the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    pub least: usize,
    pub most: usize,
}

/// A request, and when it arrives.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Seconds since the start; 0 where a text waits for others to end.
    pub seconds: f64,
    pub request: Request,
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let number = text.parse::<u32>().ok()?;
            Some(number as usize).filter(|number| *number > 0)
        };
        let (least, most) = text.split_once(':').unwrap_or((text, text));
        match (number(least), number(most)) {
            (Some(least), Some(most)) if least <= most => Ok(Self { least, most }),
            (Some(_), Some(_)) => Err(format!("{least} is more than {most}")),
            _ => Err("neither a number above 0 nor two of them, as in 16:32768".to_owned()),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.least == self.most {
            true => write!(formatter, "{}", self.most),
            false => write!(formatter, "{}:{}", self.least, self.most),
        }
    }
}

impl Lengths {
    /// The length at a place between 0 and 1, whose logarithm grows evenly.
    fn at(self, place: f64) -> usize {
        let [least, end] = [self.least, self.most + 1].map(|length| (length as f64).ln());
        let length = (least + place * (end - least)).exp() as usize;
        length.clamp(self.least, self.most)
    }
}

impl TextArgs {
    /// The first requests of this load, for a model with so many tokens.
    pub fn arrivals(&self, count: usize, vocabulary: usize) -> Vec<Arrival> {
        let shared = self.shared_tokens.min(self.input.most);
        let shared = tokens(&mut self.random(u64::MAX), shared, vocabulary);
        let mut seconds = 0.0;
        let one = |index| {
            // Each has random numbers of its own: what one has changes no other.
            let mut random = self.random(index);
            let mut draw = || unit(&mut random);
            // An even flow has times between two arrivals that fall off exponentially.
            let gap = -(1.0 - draw()).ln();
            seconds += self.rate.map_or(0.0, |rate| gap / rate);
            let [input, output] = [self.input, self.output].map(|lengths| lengths.at(draw()));
            let [begins_alike, is_constrained, has_log_probs] =
                [self.shared, self.constrained, self.log_probs].map(|share| draw() < share);
            let mut prompt = tokens(&mut random, input, vocabulary);
            if begins_alike {
                let count = shared.len().min(input - 1);
                prompt[..count].copy_from_slice(&shared[..count]);
            }
            // After all others, so that these are the same without it.
            let [is_drawn, is_penalised] = [self.drawn, 0.5].map(|share| unit(&mut random) < share);
            let mut sampling = SamplingConfig::default();
            if is_drawn {
                (sampling.temperature, sampling.top_p) = (1.0, 0.95);
                sampling.presence_penalty = f32::from(u8::from(is_penalised));
            }
            let constraint = || -> Box<dyn Constraint> { Box::new(Even { vocabulary }) };
            let request = Request {
                ignore_eos: true,
                log_probs: has_log_probs.then_some(LISTED),
                constraint: is_constrained.then(constraint),
                sampling,
                ..Request::new(&prompt, output)
            };
            Arrival { seconds, request }
        };
        (0..count as u64).map(one).collect()
    }

    /// The same with other random numbers.
    pub fn with_seed(&self, seed: u64) -> Self {
        Self {
            seed,
            ..self.clone()
        }
    }

    /// The same with other lengths.
    pub fn with_lengths(self, input: Lengths, output: Lengths) -> Self {
        Self {
            input,
            output,
            ..self
        }
    }

    /// What a line of JSON says of it.
    pub fn json(&self) -> Value {
        json!({
            "input": self.input.to_string(),
            "output": self.output.to_string(),
            "shared": self.shared,
            "shared_tokens": self.shared_tokens,
            "constrained": self.constrained,
            "log_probs": self.log_probs,
            "drawn": self.drawn,
            "rate": self.rate,
            "seed": self.seed,
        })
    }

    fn random(&self, stream: u64) -> ChaCha12Rng {
        let mut random = ChaCha12Rng::seed_from_u64(self.seed);
        random.set_stream(stream);
        random
    }
}

/// A number from 0 to below 1.
fn unit(random: &mut impl Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

fn tokens(random: &mut impl Rng, count: usize, vocabulary: usize) -> Vec<u32> {
    let mut token = || (unit(random) * vocabulary as f64) as u32;
    (0..count).map(|_| token()).collect()
}

/// Allows the tokens of even numbers.
#[derive(Clone, Debug)]
struct Even {
    vocabulary: usize,
}

impl Constraint for Even {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        for id in (0..self.vocabulary).step_by(2) {
            mask[id / 32] |= 1 << (id % 32);
        }
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
    use clap::Parser;

    use super::*;

    const VOCABULARY: usize = 1000;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        texts: TextArgs,
    }

    /// What decides what the engine does: arrival, prompt, answer, whether it is constrained, and
    /// log-probabilities.
    type Facts = (f64, Vec<u32>, usize, bool, Option<usize>);

    fn texts(options: &str) -> TextArgs {
        Cli::parse_from(format!("x {options}").split_whitespace()).texts
    }

    fn drawn(options: &str, count: usize) -> Vec<Facts> {
        let arrivals = texts(options).arrivals(count, VOCABULARY).into_iter();
        let facts = arrivals.map(|Arrival { seconds, request }| {
            assert!(request.ignore_eos);
            let constrained = request.constraint.is_some();
            (
                seconds,
                request.prompt,
                request.max_new_tokens,
                constrained,
                request.log_probs,
            )
        });
        facts.collect()
    }

    const MIXED: &str = "--input 16:32768 --output 16:2048 --rate 4 --shared 0.5 \
                         --constrained 0.25 --log-probs 0.125";

    #[test]
    fn a_seed_selects_the_texts_whatever_their_number_is() {
        let all = drawn(MIXED, 40);
        assert_eq!(drawn(MIXED, 40), all);
        assert_eq!(drawn(MIXED, 10), all[..10]);
        let others = drawn(&format!("{MIXED} --seed 1"), 40);
        assert!(others.iter().zip(&all).all(|(other, own)| other.1 != own.1));
        // A share changes nothing else.
        let plain = drawn("--input 16:32768 --output 16:2048 --rate 4", 40);
        for (plain, own) in plain.iter().zip(&all) {
            assert_eq!(
                (plain.0, plain.1.len(), plain.2),
                (own.0, own.1.len(), own.2)
            );
            assert!(!plain.3 && plain.4.is_none());
        }
    }

    #[test]
    fn lengths_times_and_shares_are_those_that_were_asked_for() {
        let all = drawn(MIXED, 2000);
        let share = |is: &dyn Fn(&Facts) -> bool| {
            all.iter().filter(|text| is(text)).count() as f64 / all.len() as f64
        };
        let close = |value: f64, expected: f64| {
            assert!((value - expected).abs() < 0.04, "{value}, not {expected}");
        };
        let within = |text: &Facts| (16..=32_768).contains(&text.1.len());
        assert!(
            all.iter()
                .all(|text| within(text) && (16..=2048).contains(&text.2))
        );
        // 16 to 32768 are eleven doublings, 16 to 2048 seven.
        close(share(&|text| text.1.len() < 32), 1.0 / 11.0);
        close(share(&|text| text.1.len() >= 16_384), 1.0 / 11.0);
        close(share(&|text| text.2 < 128), 3.0 / 7.0);
        close(share(&|text| text.3), 0.25);
        close(share(&|text| text.4 == Some(5)), 0.125);
        let first = texts(MIXED).random(u64::MAX);
        let shared = tokens(&mut first.clone(), 2000, VOCABULARY);
        let alike = |text: &Facts| {
            let count = (text.1.len() - 1).min(2000);
            text.1[..count] == shared[..count]
        };
        close(share(&alike), 0.5);
        assert!(
            all.iter()
                .all(|text| text.1.iter().all(|id| (*id as usize) < VOCABULARY))
        );
        // A quarter of a second apart, and as random as can be.
        let times: Vec<f64> = all.iter().map(|text| text.0).collect();
        let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
        let gaps: Vec<f64> = gaps.collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        close(mean, 0.25);
        let late = gaps.iter().filter(|gap| **gap > 0.25).count() as f64;
        close(late / gaps.len() as f64, (-1.0_f64).exp());
        assert!(gaps.iter().all(|gap| *gap >= 0.0));
    }

    #[test]
    fn a_length_is_one_number_or_two_in_order() {
        let parsed = |text: &str| text.parse::<Lengths>();
        assert_eq!(
            parsed("16:2048"),
            Ok(Lengths {
                least: 16,
                most: 2048
            })
        );
        assert_eq!(
            parsed("7").map(|own| [own.at(0.0), own.at(0.999)]),
            Ok([7, 7])
        );
        for wrong in [
            "",
            "0",
            "0:4",
            "4:2",
            "4:",
            "-1",
            "1:2:3",
            "many",
            "99999999999",
        ] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
