//! How the trunk of a step runs: on one device or several in turn, or on all at once.

use std::ops::Range;

use burn::tensor::{Int, Tensor};

use super::state::Lanes;
use crate::cache::OpenStep;
use crate::generate::engine::results::{PartResults, StepResults};
use crate::generate::engine::setup::Setup;
use crate::generate::error::GenerateError;
use crate::model::{Model, Passing, Ranks, Runs};
use crate::trace::Trace;

/// Runs the parts of a step, one for each device that has some.
pub(crate) trait Executor {
    /// Tokens of a prompt that take a GPU as long as the host takes to launch a forward call of
    /// few: on an H200, with 43 layers, 31 ms.
    fn call_tokens(&self) -> usize {
        512
    }

    /// Whether parts wait for each other while they run, so that none may be waited for before all
    /// are launched.
    fn is_joint(&self) -> bool {
        false
    }

    /// Why steps cannot be recorded, where that is so.
    fn refusal(&self, _: &Model) -> Option<&'static str> {
        None
    }

    /// Enqueues all parts of a step.
    fn launch(
        &self,
        lanes: &mut Lanes,
        setup: &Setup,
        open: OpenStep,
    ) -> Result<StepResults, GenerateError>;

    /// Enqueues one part of a step, so that it can be recorded: it begins with what was passed to
    /// its device last.
    fn part(
        &self,
        lanes: &mut Lanes,
        setup: &Setup,
        open: OpenStep,
        part: usize,
    ) -> Result<PartResults, GenerateError>;
}

/// The executor of a model.
pub(crate) fn executor(model: &Model) -> Box<dyn Executor + '_> {
    match Ranks::of(model) {
        Some(ranks) => Box::new(InParts(ranks)),
        None => Box::new(InTurn),
    }
}

/// Each device has some of the layers, or the only one has all of them.
struct InTurn;

impl Executor for InTurn {
    fn refusal(&self, model: &Model) -> Option<&'static str> {
        let is_distinct = model.placement.is_distinct();
        (!is_distinct).then_some("a device has layers in several places")
    }

    fn launch(
        &self,
        lanes: &mut Lanes,
        setup: &Setup,
        open: OpenStep,
    ) -> Result<StepResults, GenerateError> {
        let mut given = None;
        for part in 0..lanes.links.devices().len() - 1 {
            let rows = pass(lanes, setup, open, (part, given));
            given = Some(lanes.links.deliver(rows, part + 1));
        }
        let results = finish(lanes, setup, open, given)?;
        let trunk = &mut lanes.caches.trunk;
        lanes.links.hand_back(results.next.as_ref(), trunk, false);
        Ok(results)
    }

    fn part(
        &self,
        lanes: &mut Lanes,
        setup: &Setup,
        open: OpenStep,
        part: usize,
    ) -> Result<PartResults, GenerateError> {
        let tokens = lanes.lanes() * open.count();
        let given = (part > 0).then(|| lanes.links.arrival(part, tokens));
        Ok(match part + 1 == lanes.links.devices().len() {
            true => PartResults::Chosen(Box::new(finish(lanes, setup, open, given)?)),
            false => PartResults::Passed(Box::new(pass(lanes, setup, open, (part, given)))),
        })
    }
}

/// Each device has a part of every layer.
struct InParts<'m>(Ranks<'m>);

impl Executor for InParts<'_> {
    /// 110 ms on two H200s.
    fn call_tokens(&self) -> usize {
        2048
    }

    fn is_joint(&self) -> bool {
        true
    }

    fn refusal(&self, _: &Model) -> Option<&'static str> {
        let is_recordable = self.0.parallel.group().is_recordable();
        (!is_recordable).then_some("devices exchange through the host")
    }

    fn launch(
        &self,
        lanes: &mut Lanes,
        setup: &Setup,
        open: OpenStep,
    ) -> Result<StepResults, GenerateError> {
        let results = self.run(lanes, setup, open, 0..self.0.parallel.ranks())?;
        Ok(results.expect("the last device is one of them"))
    }

    fn part(
        &self,
        lanes: &mut Lanes,
        setup: &Setup,
        open: OpenStep,
        part: usize,
    ) -> Result<PartResults, GenerateError> {
        let results = self.run(lanes, setup, open, part..part + 1)?;
        let chosen = results.map(|results| PartResults::Chosen(Box::new(results)));
        Ok(chosen.unwrap_or(PartResults::Exchanged))
    }
}

impl InParts<'_> {
    /// Enqueues the parts of a step of some devices. Returns the results if the last of all is one
    /// of them.
    fn run(
        &self,
        lanes: &mut Lanes,
        setup: &Setup,
        open: OpenStep,
        ranks: Range<usize>,
    ) -> Result<Option<StepResults>, GenerateError> {
        let (model, count, first) = (setup.model, open.count(), ranks.start);
        let last = self.0.parallel.ranks() - 1;
        let inputs = ranks.clone().map(|rank| {
            let inputs = match rank == last {
                true => lanes.inputs(),
                false => lanes.links.inputs(rank),
            };
            inputs.narrow(1, 0, count)
        });
        let (inputs, trunk) = (inputs.collect(), &mut lanes.caches.trunk);
        let passings = self
            .0
            .run_from((first, inputs), open, trunk, setup.taps(), &Trace::off());
        let positions = [lanes.lanes(), count];
        // A clustered head is on the last device, and needs no logits of others.
        let mut logits = model.flash_head.is_none().then(|| {
            let streams = passings.iter().map(|passing| passing.streams.clone());
            self.0.logits(first, streams.collect(), positions)
        });
        let mut next: Vec<Tensor<1, Int>> = Vec::new();
        let mut results = None;
        for (rank, passing) in ranks.clone().zip(passings) {
            if rank < last {
                let inputs = lanes.links.inputs(rank);
                let [rows, columns] = inputs.dims();
                let like = (&inputs.device(), inputs.dtype());
                next.push(Tensor::zeros([rows * (columns + 1)], like));
                continue;
            }
            let logits = logits.as_mut().and_then(Vec::pop);
            let mut own = lanes.conclude(setup, open, passing, logits)?;
            next.extend(own.next.take());
            results = Some(own);
        }
        let next = self.0.parallel.group().broadcast(last, first, next);
        let next = next.map_err(GenerateError::Logits)?;
        for (rank, next) in ranks.zip(next).filter(|(rank, _)| *rank < last) {
            lanes.links.take_back(rank, next, &mut lanes.caches.trunk);
        }
        Ok(results)
    }
}

/// Enqueues the part of a step of a device other than the last, after what it was given by the one
/// before. Returns what it passes on.
fn pass(
    lanes: &mut Lanes,
    setup: &Setup,
    open: OpenStep,
    (part, given): (usize, Option<Tensor<2>>),
) -> Tensor<2> {
    let inputs = lanes.links.inputs(part).narrow(1, 0, open.count());
    let passing = run(lanes, setup, open, part, (inputs, given));
    passing.rows(setup.model.config())
}

/// Enqueues the part of a step of the last device.
fn finish(
    lanes: &mut Lanes,
    setup: &Setup,
    open: OpenStep,
    given: Option<Tensor<2>>,
) -> Result<StepResults, GenerateError> {
    let inputs = lanes.inputs().narrow(1, 0, open.count());
    let last = lanes.links.devices().len() - 1;
    let passing = run(lanes, setup, open, last, (inputs, given));
    lanes.conclude(setup, open, passing, None)
}

fn run(
    lanes: &mut Lanes,
    setup: &Setup,
    open: OpenStep,
    part: usize,
    (inputs, given): (Tensor<2, Int>, Option<Tensor<2>>),
) -> Passing {
    let (model, trunk) = (setup.model, &mut lanes.caches.trunk);
    let given = given.map(|rows| model.passed(rows, inputs.dims()));
    let step = trunk.step(open, part);
    lanes.engrams.hand(&step, trunk.batch() * open.count());
    let (given, cache) = ((inputs, given), (&step, &mut *trunk));
    let passing = Runs(model).part(part, given, cache, setup.taps(), &Trace::off());
    trunk.advance(part, step);
    passing
}
