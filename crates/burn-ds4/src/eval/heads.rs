//! The clustered head against the dense one: what it finds, what its drafts are worth, how fast it
//! is.

use std::error::Error;
use std::io::{self, Write};
use std::time::Instant;

use burn::tensor::Tensor;
use ds4_model::flash_head::ProbedHead;
use ds4_model::generate::{GenerateConfig, Generation};
use ds4_model::model::Model;
use serde::Serialize;

/// Texts that are continued.
const PROMPTS: usize = 4;
/// Tokens of each.
const PROMPT: usize = 32;

/// Counts for one number of probes.
#[derive(Debug, Default)]
struct ProbeCounts {
    recalled: usize,
    drafts_recalled: usize,
    accepted: usize,
}

/// Counts over a text, for every number of probes.
#[derive(Debug)]
pub struct Curve {
    heads: Vec<(ProbedHead, ProbeCounts)>,
    positions: usize,
    drafts: usize,
    dense_accepted: usize,
}

impl Curve {
    /// A curve over 1, 2, 4, .. and all clusters.
    pub fn new(head: &ProbedHead) -> Result<Self, Box<dyn Error>> {
        let clusters = head.head().clusters();
        let powers = std::iter::successors(Some(1), |probes| Some(2 * probes));
        let probes = powers.take_while(|probes| *probes < clusters);
        let heads = probes.chain([clusters]).map(|probes| {
            let head = ProbedHead::new(head.head().clone(), probes)?;
            Ok((head, ProbeCounts::default()))
        });
        Ok(Self {
            heads: heads.collect::<Result<_, Box<dyn Error>>>()?,
            positions: 0,
            drafts: 0,
            dense_accepted: 0,
        })
    }

    /// The tokens of each number of probes at hidden states `[1, positions, d_model]`.
    pub fn tokens(&self, hidden: &Tensor<3>) -> Result<Vec<Vec<u32>>, Box<dyn Error>> {
        let tokens = self.heads.iter().map(|(head, _)| {
            let tokens = head.greedy_tokens(hidden.clone())?;
            let tokens = tokens.try_into_vec_as::<i32>()?;
            Ok(tokens.into_iter().map(|token| token as u32).collect())
        });
        tokens.collect()
    }

    /// Counts what [`tokens`](Self::tokens) has found where the trunk chooses `dense`.
    pub fn count(&mut self, found: &[Vec<u32>], dense: &[u32]) {
        self.positions += dense.len();
        for ((_, counts), found) in self.heads.iter_mut().zip(found) {
            counts.recalled += equal(found, dense);
        }
    }

    /// Counts what [`tokens`](Self::tokens) has found where the MTP layer chooses `dense`; the
    /// trunk verifies with `trunk`.
    pub fn count_drafts(&mut self, found: &[Vec<u32>], dense: &[u32], trunk: &[u32]) {
        let drafts = dense.len().min(trunk.len());
        let (dense, trunk) = (&dense[..drafts], &trunk[..drafts]);
        self.drafts += drafts;
        self.dense_accepted += equal(dense, trunk);
        for ((_, counts), found) in self.heads.iter_mut().zip(found) {
            counts.drafts_recalled += equal(found, dense);
            counts.accepted += equal(found, trunk);
        }
    }

    /// What was counted.
    pub fn report(&self, generation: Vec<GenerationRun>) -> HeadReport {
        let drafts = |count| (self.drafts > 0).then(|| count as f64 / self.drafts as f64);
        let probes = self.heads.iter().map(|(head, counts)| ProbeReport {
            probes: head.probes(),
            recall: counts.recalled as f64 / self.positions as f64,
            draft_recall: drafts(counts.drafts_recalled),
            acceptance: drafts(counts.accepted),
        });
        let (head, _) = &self.heads[0];
        HeadReport {
            clusters: head.head().clusters(),
            capacity: head.head().capacity(),
            positions: self.positions,
            drafts: self.drafts,
            dense_acceptance: drafts(self.dense_accepted),
            probes: probes.collect(),
            generation,
        }
    }
}

fn equal(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a == b).count()
}

/// The clustered head on a text.
#[derive(Debug, Serialize)]
pub struct HeadReport {
    clusters: usize,
    capacity: usize,
    positions: usize,
    drafts: usize,
    dense_acceptance: Option<f64>,
    probes: Vec<ProbeReport>,
    generation: Vec<GenerationRun>,
}

/// Results for one number of probes, as fractions.
#[derive(Debug, Serialize)]
struct ProbeReport {
    probes: usize,
    recall: f64,
    draft_recall: Option<f64>,
    acceptance: Option<f64>,
}

/// Generation with one head for the drafts.
#[derive(Debug, Serialize)]
pub struct GenerationRun {
    draft_head: &'static str,
    probes: Option<usize>,
    tokens: usize,
    drafted: usize,
    accepted: usize,
    acceptance: f64,
    tokens_per_second: f64,
}

impl HeadReport {
    /// Prints tables.
    pub fn print(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(
            out,
            "\nFlash head, {} clusters of {} tokens; acceptance of the dense head's drafts {}",
            self.clusters,
            self.capacity,
            percent(self.dense_acceptance).trim_start(),
        )?;
        writeln!(out, "probes  recall@1  recall@1 of drafts  acceptance")?;
        for probe in &self.probes {
            writeln!(
                out,
                "{:>6}  {}  {:>10}{}  {}",
                probe.probes,
                percent(Some(probe.recall)),
                "",
                percent(probe.draft_recall),
                format_args!("{:>2}{}", "", percent(probe.acceptance)),
            )?;
        }
        if self.generation.is_empty() {
            return Ok(());
        }
        writeln!(out, "\ndrafts by            drafts  acceptance  tokens/s")?;
        for run in &self.generation {
            let name = match run.probes {
                Some(probes) => format!("{} head, P = {probes}", run.draft_head),
                None => format!("{} head", run.draft_head),
            };
            let acceptance = percent(Some(run.acceptance));
            writeln!(
                out,
                "{name:<19}  {:>6}  {acceptance:>10}  {:>8.1}",
                run.drafted, run.tokens_per_second
            )?;
        }
        Ok(())
    }
}

/// A percentage as wide as the header of its column.
fn percent(fraction: Option<f64>) -> String {
    match fraction {
        Some(fraction) => format!("{:>6.1} %", 100.0 * fraction),
        None => format!("{:>8}", "-"),
    }
}

/// Continues the text from several positions, with drafts by either head.
pub fn generate(
    model: &Model,
    head: &ProbedHead,
    text: &[u32],
    options: &GenerateConfig,
) -> Result<Vec<GenerationRun>, Box<dyn Error>> {
    let stride = (text.len() / PROMPTS).max(1);
    let prompts = text.chunks(stride).take(PROMPTS).map(|part| {
        let part = &part[..part.len().min(PROMPT)];
        [&[model.config().bos_token_id], part].concat()
    });
    let prompts: Vec<Vec<u32>> = prompts.collect();
    let mut model = model.clone();
    let mut runs = Vec::new();
    for head in [None, Some(head)] {
        model.set_draft_head(head.cloned());
        runs.push(run(&model, &prompts, options, head)?);
    }
    Ok(runs)
}

fn run(
    model: &Model,
    prompts: &[Vec<u32>],
    options: &GenerateConfig,
    head: Option<&ProbedHead>,
) -> Result<GenerationRun, Box<dyn Error>> {
    // Kernels are compiled when they are first needed.
    continue_text(model, &prompts[0], options)?;
    let mut total = GenerationRun {
        draft_head: if head.is_some() { "flash" } else { "dense" },
        probes: head.map(ProbedHead::probes),
        tokens: 0,
        drafted: 0,
        accepted: 0,
        acceptance: 0.0,
        tokens_per_second: 0.0,
    };
    let mut seconds = 0.0;
    for prompt in prompts {
        let (tokens, [drafted, accepted], elapsed) = continue_text(model, prompt, options)?;
        total.tokens += tokens;
        total.drafted += drafted;
        total.accepted += accepted;
        seconds += elapsed;
    }
    total.acceptance = total.accepted as f64 / total.drafted.max(1) as f64;
    // The first token of each text comes with its prompt.
    total.tokens_per_second = (total.tokens - prompts.len().min(total.tokens)) as f64 / seconds;
    Ok(total)
}

/// Tokens, drafts made and accepted, and the seconds after the prompt.
fn continue_text(
    model: &Model,
    prompt: &[u32],
    options: &GenerateConfig,
) -> Result<(usize, [usize; 2], f64), Box<dyn Error>> {
    let mut generation = Generation::new(model, options.clone(), prompt)?;
    generation.prefill()?;
    let started = Instant::now();
    let mut tokens = 0;
    for token in generation.by_ref() {
        token?;
        tokens += 1;
    }
    let stats = generation.stats();
    let counts = [stats.drafted, stats.accepted];
    Ok((tokens, counts, started.elapsed().as_secs_f64()))
}
