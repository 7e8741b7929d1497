//! What a load results in, for readers and as JSON.

use ds4_model::model::Model;
use serde_json::{Value, json};

use super::LoadOptions;
use super::clients::{Burst, Seen};
use crate::bench::calls::Timings;
use crate::bench::decoding::{devices, name_of};

/// A load, and what was seen of it.
pub struct Load<'a> {
    pub options: &'a LoadOptions,
    pub model: &'a Model,
    pub concurrency: usize,
    pub lanes: usize,
    /// Seconds from the first request to the last token or, of a burst, to its last first token.
    pub seconds: f64,
    /// Seconds in which kernels were compiled before.
    pub warm_up: Option<f64>,
    /// Kernels that were launched before, and others that were while time counted.
    pub compiled: Option<[usize; 2]>,
    pub replays: usize,
    pub seen: Seen,
    pub burst: Option<Burst>,
}

/// Times of many texts or tokens: what half of them and 99 of 100 do not exceed, and the longest.
/// In milliseconds, and exact; `None` where there are none.
#[derive(Clone, Copy, Debug)]
struct Spread(Option<[f64; 3]>);

impl Spread {
    fn of(seconds: &[f64]) -> Self {
        let sorted = (!seconds.is_empty()).then(|| Timings::new(seconds.to_vec()));
        Self(sorted.map(|sorted| [50, 99, 100].map(|percent| sorted.percentile(percent) * 1e3)))
    }

    fn text(self) -> String {
        let Some([p50, p99, worst]) = self.0 else {
            return "none".to_owned();
        };
        format!("p50 {p50:.2}, p99 {p99:.2}, worst {worst:.2}")
    }

    fn json(self) -> Value {
        let Some([p50, p99, worst]) = self.0 else {
            return Value::Null;
        };
        json!({"p50": p50, "p99": p99, "worst": worst})
    }
}

impl Load<'_> {
    /// Prints it.
    pub fn print(&self) {
        let Self { seen, seconds, .. } = self;
        let warm_up = self
            .warm_up
            .map(|time| format!(", after {time:.1} s to compile kernels"));
        let texts = self.concurrency;
        match (&self.burst, self.options.texts.rate) {
            (Some(_), _) => print!("\n{texts} texts, beside which others arrive"),
            (None, Some(rate)) => print!("\n{rate} texts a second"),
            (None, None) => print!("\n{texts} texts at a time"),
        }
        let (ended, warm_up) = (self.ended(), warm_up.unwrap_or_default());
        println!(", {} lanes, {ended} in {seconds:.1} s{warm_up}", self.lanes);
        if let Some(error) = &seen.error {
            println!("  failed            {}, the first: {error}", seen.failed);
        }
        if let Some(burst) = &self.burst {
            println!("  usually, ms       {}", Spread::of(&burst.usual).text());
        } else {
            let [total, own, output] = self.rates();
            let devices = devices(self.model);
            println!("  tokens/s          {total:.1}, {own:.1} by each of {devices} devices");
            println!("  of answers        {output:.1}");
        }
        println!("  first token, ms   {}", Spread::of(&seen.first).text());
        println!("  next tokens, ms   {}", Spread::of(&seen.between).text());
        if self.burst.is_none() {
            println!("  a token, ms       {}", Spread::of(&seen.per_token).text());
        }
        let [rows, texts] = self.a_step();
        let (steps, replays) = (seen.steps, self.replays);
        println!(
            "  steps             {steps}, {replays} replays; {rows:.1} rows, {texts:.1} texts"
        );
        println!("  caches            {} bytes", seen.cache_bytes);
        if let Some([before, late]) = self.compiled {
            println!("  kernels           {before} before, {late} late");
        }
    }

    /// The same as a line of JSON.
    pub fn json(&self) -> Value {
        let Self { seen, options, .. } = self;
        let model = self.model;
        let mut line = options.drafting().json(model);
        let Value::Object(fields) = &mut line else {
            unreachable!("an object");
        };
        if let Value::Object(texts) = options.texts.json() {
            fields.extend(texts);
        }
        let rates = self.burst.is_none().then(|| self.rates());
        let [rows, texts] = self.a_step();
        let (first, between) = (Spread::of(&seen.first), Spread::of(&seen.between));
        let figures = json!({
            "kind": if self.burst.is_some() { "burst" } else { "load" },
            "model": options.model.json_name(),
            "layers": model.config().layers.len(),
            "experts": model.config().n_routed_experts,
            "dtype": format!("{:?}", options.model.dtype).to_lowercase(),
            "activations": name_of(options.model.activations.into()),
            "devices": devices(model),
            "parallel": model.parallel.as_ref().map(|_| "tensor"),
            "overlap": !options.no_overlap,
            "graphs": !options.no_graph,
            "prefill_chunk": options.prefill_chunk,
            "prefix_bytes": options.prefix_cache,
            "concurrency": self.concurrency,
            "lanes": self.lanes,
            "burst": options.burst,
            "burst_input": options.burst.map(|_| options.burst_input.to_string()),
            "warm_up_seconds": self.warm_up,
            "kernels": self.compiled.map(|[before, _]| before),
            "late_kernels": self.compiled.map(|[_, late]| late),
            "seconds": self.seconds,
            "finished": seen.finished,
            "failed": seen.failed,
            "prompt_tokens": seen.input,
            "cached_tokens": seen.cached,
            "output_tokens": seen.output,
            "tokens_per_second": rates.map(|[total, ..]| total),
            "tokens_per_second_per_device": rates.map(|[_, own, _]| own),
            "output_tokens_per_second": rates.map(|[.., output]| output),
            "first_token_ms": first.json(),
            "between_tokens_ms": between.json(),
            "token_ms": Spread::of(&seen.per_token).json(),
            "usual_ms": self.burst.as_ref().map(|burst| Spread::of(&burst.usual).json()),
            "steps": seen.steps,
            "replays": self.replays,
            "rows_per_step": rows,
            "texts_per_step": texts,
            "cache_bytes": seen.cache_bytes,
        });
        if let Value::Object(figures) = figures {
            fields.extend(figures);
        }
        line
    }

    /// What is done at the end.
    fn ended(&self) -> String {
        match self.burst {
            Some(_) => format!("{} have a token", self.seen.first.len()),
            None => format!("{} ended", self.seen.finished),
        }
    }

    /// Tokens a second: of prompts and answers, the same by device, and of answers.
    fn rates(&self) -> [f64; 3] {
        let Seen { input, output, .. } = self.seen;
        let [total, output] = [input + output, output].map(|tokens| tokens as f64 / self.seconds);
        [total, total / devices(self.model) as f64, output]
    }

    /// Rows and texts of a step.
    fn a_step(&self) -> [f64; 2] {
        let Seen { rows, texts, .. } = self.seen;
        [rows, texts].map(|count| count as f64 / self.seen.steps.max(1) as f64)
    }
}
