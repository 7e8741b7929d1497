//! What runs the layers of a trunk: whole ones, on one device or on several in turn, or parts of
//! every layer on all devices at once.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::collective::GroupError;
use burn_ds4_ops::transfer::{transfer, transfer_in_turn};

use super::modules::Model;
use super::passing::Passing;
use crate::block::{flattened, unflattened};
use crate::cache::{Cache, OpenStep, Step};
use crate::hyper_connection::Streams;
use crate::parallel::TensorParallel;
use crate::trace::Trace;

/// Runs the layers of a model.
pub(crate) trait Trunk {
    /// Prepares the devices for a step.
    fn prepare(&self) -> Result<(), GroupError> {
        Ok(())
    }

    /// Waits for what the calling thread has launched, and tells whether a device has waited in
    /// vain for another.
    fn check(&self) -> Result<(), GroupError> {
        Ok(())
    }

    /// Runs all layers over token ids `[batch, positions]`. The caches take their rows, and the
    /// lengths there advance.
    fn run(
        &self,
        token_ids: Tensor<2, Int>,
        open: OpenStep,
        cache: &mut Cache,
        taps: &[usize],
        trace: &Trace,
    ) -> Passing;
}

/// Whole layers, those of one device after the other.
pub(crate) struct Runs<'m>(pub(crate) &'m Model);

impl Trunk for Runs<'_> {
    fn run(
        &self,
        token_ids: Tensor<2, Int>,
        open: OpenStep,
        cache: &mut Cache,
        taps: &[usize],
        trace: &Trace,
    ) -> Passing {
        let (model, positions) = (self.0, token_ids.dims());
        let mut passing: Option<Passing> = None;
        for (part, run) in model.placement.runs().iter().enumerate() {
            let (given, token_ids) = match passing {
                None => (None, transfer(token_ids.clone(), &run.device)),
                Some(passing) => {
                    let rows = transfer(passing.rows(&model.config), &run.device);
                    // The host must not wait: it has to launch the sender's next chunk meanwhile.
                    // SAFETY: all that the device still has to do is to receive the rows.
                    let token_ids = unsafe { transfer_in_turn(token_ids.clone(), &run.device) };
                    (Some(model.passed(rows, positions)), token_ids)
                }
            };
            let step = cache.step(open, part);
            passing = Some(self.part(part, (token_ids, given), (&step, cache), taps, trace));
            cache.advance(part, step);
        }
        passing.expect("there is at least one run")
    }
}

impl Runs<'_> {
    /// Runs the layers of one device over token ids `[batch, positions]`, after what the device
    /// before it has passed on.
    pub(crate) fn part(
        &self,
        part: usize,
        (token_ids, given): (Tensor<2, Int>, Option<Passing>),
        (step, cache): (&Step, &mut Cache),
        taps: &[usize],
        trace: &Trace,
    ) -> Passing {
        let model = self.0;
        let positions = token_ids.dims();
        let token_ids = model.in_vocabulary(token_ids);
        let layers = model.placement.runs()[part].layers.clone();
        model.look_up_engrams(&token_ids, step, cache, &layers);
        let at_input = model
            .config
            .dspark
            .as_ref()
            .is_some_and(|dspark| dspark.taps_inputs);
        let mut passing =
            given.unwrap_or_else(|| model.embedded(model.embedding.val(), token_ids.clone()));
        for index in layers {
            let (layer, cache) = (&model.layers[index], &mut cache.layers_mut()[index]);
            let trace = trace.scope(&format!("layer{index}"));
            passing.streams = layer.enter(passing.streams, step, &trace);
            if at_input && taps.contains(&index) {
                passing.tap(positions);
            }
            let streams = passing.streams;
            passing.streams = layer.pass(streams, token_ids.clone(), step, cache, &trace);
            if !at_input && taps.contains(&index) {
                passing.tap(positions);
            }
        }
        passing
    }
}

/// A part of every layer on each device.
#[derive(Clone, Copy)]
pub(crate) struct Ranks<'m> {
    model: &'m Model,
    pub(crate) parallel: &'m TensorParallel,
}

impl<'m> Ranks<'m> {
    /// Those of a model, if its layers are in parts.
    pub(crate) fn of(model: &'m Model) -> Option<Self> {
        let parallel = model.parallel.as_ref()?;
        Some(Self { model, parallel })
    }
}

impl Trunk for Ranks<'_> {
    fn prepare(&self) -> Result<(), GroupError> {
        self.parallel.group().prepare()
    }

    fn check(&self) -> Result<(), GroupError> {
        self.parallel.group().check()
    }

    fn run(
        &self,
        token_ids: Tensor<2, Int>,
        open: OpenStep,
        cache: &mut Cache,
        taps: &[usize],
        trace: &Trace,
    ) -> Passing {
        let devices = self.parallel.devices().iter();
        let token_ids = devices.map(|device| transfer(token_ids.clone(), device));
        let ranks = self.run_from((0, token_ids.collect()), open, cache, taps, trace);
        let last = ranks.into_iter().next_back();
        last.expect("there is a rank at least")
    }
}

impl Ranks<'_> {
    /// Runs all layers on the devices of some ranks, the first of them with the first of the token
    /// ids `[batch, positions]`. The caches take their rows, and the lengths there advance.
    pub(crate) fn run_from(
        &self,
        (first, token_ids): (usize, Vec<Tensor<2, Int>>),
        open: OpenStep,
        cache: &mut Cache,
        taps: &[usize],
        trace: &Trace,
    ) -> Vec<Passing> {
        let Self { model, parallel } = *self;
        let (layers, last) = (model.layers.len(), parallel.ranks() - 1);
        let all = Trace::off();
        let trace = |rank: usize| if rank == last { trace } else { &all };
        let ids = token_ids.into_iter().map(|ids| model.in_vocabulary(ids));
        let ids: Vec<Tensor<2, Int>> = ids.collect();
        let positions = ids[0].dims();
        let ranks = first..first + ids.len();
        let steps = ranks.clone().map(|rank| cache.step(open, rank));
        let steps: Vec<Step> = steps.collect();
        let mut passings: Vec<Passing> = ranks
            .clone()
            .zip(&ids)
            .map(|(rank, ids)| {
                let embedding = match parallel.other(rank) {
                    Some(rank) => rank.embedding.clone(),
                    None => model.embedding.val(),
                };
                model.embedded(embedding, ids.clone())
            })
            .collect();
        for index in 0..layers {
            let block = |rank: usize| match parallel.other(rank) {
                Some(rank) => &rank.layers[index],
                None => &model.layers[index],
            };
            let name = format!("layer{index}");
            let given = passings.iter().zip(ranks.clone()).zip(&steps);
            let partials = given.map(|((passing, rank), step)| {
                let cache = &mut cache.layers_mut()[rank * layers + index];
                let (streams, trace) = (passing.streams.clone(), trace(rank).scope(&name));
                block(rank).attend(streams, positions, step, cache, &trace)
            });
            let attended = parallel.sum(first, partials.collect());
            let given = attended.into_iter().zip(ranks.clone());
            let partials = given.zip(ids.iter().zip(&steps));
            let partials = partials.map(|((streams, rank), (ids, step))| {
                let trace = trace(rank).scope(&name);
                block(rank).mix_experts(streams, ids.clone(), step, &trace)
            });
            let mixed = parallel.sum(first, partials.collect());
            for ((passing, streams), rank) in passings.iter_mut().zip(mixed).zip(ranks.clone()) {
                passing.streams = streams;
                let trace = trace(rank).scope(&name);
                trace.record_with("output", || unflattened(passing.streams.clone(), positions));
                if rank == last && taps.contains(&index) {
                    passing.tap(positions);
                }
            }
        }
        for (rank, step) in ranks.zip(steps) {
            cache.advance(rank, step);
        }
        passings
    }

    /// The logits at what the ranks from `first` on have: `[batch, positions, vocabulary]` on each
    /// of them.
    pub(crate) fn logits(
        &self,
        first: usize,
        streams: Vec<Streams>,
        [batch, positions]: [usize; 2],
    ) -> Vec<Tensor<3>> {
        let Self { model, parallel } = *self;
        let hidden = streams.into_iter().zip(first..);
        let hidden = hidden.map(|(streams, rank)| match parallel.other(rank) {
            Some(rank) => rank.head.forward_norm(streams, &rank.norm),
            None => model.head.forward_norm(streams, &model.norm),
        });
        let logits = parallel.logits(first, hidden.collect()).into_iter();
        let logits = logits.map(|logits| {
            let [_, vocabulary] = logits.dims();
            logits.reshape([batch, positions, vocabulary])
        });
        logits.collect()
    }
}

impl Model {
    /// The streams of token ids `[batch, positions]` before the first layer.
    fn embedded(&self, embedding: Tensor<2>, token_ids: Tensor<2, Int>) -> Passing {
        let embedded = embed(embedding, token_ids);
        let streams = embedded
            .unsqueeze_dim::<4>(2)
            .repeat_dim(2, self.config.hc_mult);
        Passing {
            streams: flattened(streams),
            tapped: Vec::new(),
        }
    }

    /// What the device before has passed on as [rows](Passing::rows).
    pub(crate) fn passed(&self, rows: Tensor<2>, positions: [usize; 2]) -> Passing {
        Passing::of_rows(rows, &self.config, positions)
    }

    pub(super) fn in_vocabulary(&self, token_ids: Tensor<2, Int>) -> Tensor<2, Int> {
        let [vocabulary, _] = self.embedding.dims();
        token_ids.clamp(0, vocabulary as i64 - 1)
    }
}

/// Rows `[batch, positions, d_model]` of a matrix `[vocabulary, d_model]`.
pub(super) fn embed(embedding: Tensor<2>, token_ids: Tensor<2, Int>) -> Tensor<3> {
    let ([batch, positions], [_, d_model]) = (token_ids.dims(), embedding.dims());
    let embedded = embedding.select(0, token_ids.reshape([batch * positions]));
    embedded.reshape([batch, positions, d_model])
}
