//! What goes from one device to another in the steps of a group of lanes whose layers are divided.
//!
//! The streams go from each device to the next. What the last device has chosen, and the lengths of
//! the texts, go back to all others, before the next step begins. Recorded steps are replayed
//! device by device, and what is moved goes in between: it arrives in new memory, which cannot be
//! recorded, and is copied to where the next recording reads.

use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::transfer::{transfer, transfer_in_turn};

use super::super::recorder::launches;
use super::super::results::PartResults;
use super::super::setup::Setup;
use crate::cache::Cache;

#[derive(Clone, Debug)]
pub(super) struct Links {
    /// One for each run of layers.
    devices: Vec<Device>,
    /// The inputs of the lanes on each device but the last, which has the lanes' own. Taken while
    /// they are written.
    inputs: Vec<Option<Tensor<2, Int>>>,
    /// Where each device but the first has what was passed to it last. Taken while it is written.
    arrivals: Vec<Option<Tensor<2>>>,
    /// How much this thread had [launched](launches) when all devices had done what they were given
    /// before.
    done: Option<u64>,
}

impl Links {
    pub(super) fn new(setup: &Setup, lanes: usize) -> Self {
        let runs = setup.model.placement.runs().iter();
        let devices: Vec<Device> = runs.map(|run| run.device.clone()).collect();
        let (_, others) = devices.split_last().expect("there is at least one run");
        let columns = 1 + setup.config.drafts;
        let inputs = others.iter();
        let inputs = inputs.map(|device| Some(Tensor::zeros([lanes, columns], device)));
        Self {
            inputs: inputs.collect(),
            arrivals: Vec::new(),
            done: None,
            devices,
        }
    }

    /// The devices, in the order of a step.
    pub(super) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Whether there is more than one part of a step.
    pub(super) fn is_divided(&self) -> bool {
        self.devices.len() > 1
    }

    /// The inputs on a device other than the last.
    pub(super) fn inputs(&self, part: usize) -> Tensor<2, Int> {
        self.inputs[part].clone().expect("they are put back")
    }

    /// Adds vacant lanes.
    pub(super) fn widen(&mut self, lanes: usize) {
        self.arrivals.clear();
        for inputs in &mut self.inputs {
            let known = inputs.take().expect("they are put back");
            let [rows, columns] = known.dims();
            let like = (&known.device(), known.dtype());
            let more = Tensor::zeros([lanes - rows, columns], like);
            *inputs = Some(Tensor::cat(vec![known, more], 0));
        }
    }

    /// Sets the inputs of a lane (`[1, columns]`).
    pub(super) fn enter(&mut self, lane: usize, own: &Tensor<2, Int>) {
        for (inputs, device) in self.inputs.iter_mut().zip(&self.devices) {
            let known = inputs.take().expect("they are put back");
            let [_, columns] = known.dims();
            let own = transfer(own.clone(), device).cast(known.dtype());
            *inputs = Some(known.slice_assign([lane..lane + 1, 0..columns], own));
        }
    }

    /// Makes the places where recorded steps of so many tokens find what was passed.
    pub(super) fn prepare(&mut self, setup: &Setup, tokens: usize) {
        let runs = setup.model.placement.runs().iter().skip(1);
        let dtype = setup.model.embedding.val().dtype();
        let [_, d_model] = setup.model.embedding.dims();
        let arrivals = runs.map(|run| {
            let before = |layer: &&usize| **layer < run.layers.start;
            let taps = setup.taps().iter().filter(before).count();
            let columns = (setup.model.config().hc_mult + taps) * d_model;
            Some(Tensor::zeros([tokens, columns], (&run.device, dtype)))
        });
        self.arrivals = arrivals.collect();
    }

    /// What a device other than the first was passed.
    pub(super) fn arrival(&self, part: usize) -> Tensor<2> {
        self.arrivals[part - 1].clone().expect("it is put back")
    }

    /// Passes on what a recorded part of a step results in, after its replay.
    pub(super) fn follow(&mut self, part: usize, results: &PartResults, trunk: &mut Cache) {
        match results {
            PartResults::Passed(rows) => {
                let arrived = self.moved(rows.clone(), part + 1);
                let place = self.arrivals[part].take().expect("it is put back");
                let [rows, columns] = place.dims();
                self.arrivals[part] = Some(place.slice_assign([0..rows, 0..columns], arrived));
            }
            PartResults::Chosen(results) => {
                let in_turn = self.is_in_turn();
                self.hand_back(results.next.as_ref(), trunk, in_turn);
                self.done = Some(launches());
            }
        }
    }

    /// Hands what the last device has for the next step to all others: `next` is
    /// `[lanes, columns + 1]`, the inputs and the length of each lane.
    pub(super) fn hand_back(
        &mut self,
        next: Option<&Tensor<2, Int>>,
        trunk: &mut Cache,
        in_turn: bool,
    ) {
        let Some(next) = next else {
            return;
        };
        for (part, inputs) in self.inputs.iter_mut().enumerate() {
            let device = &self.devices[part];
            let next = match in_turn {
                true => transfer_in_turn(next.clone(), device),
                false => transfer(next.clone(), device),
            };
            let known = inputs.take().expect("they are put back");
            let [lanes, columns] = known.dims();
            let own = next.clone().narrow(1, 0, columns).cast(known.dtype());
            *inputs = Some(known.slice_assign([0..lanes, 0..columns], own));
            let lengths = next.narrow(1, columns, 1).reshape([lanes]);
            trunk.set_start(part, lengths);
        }
    }

    fn moved(&self, rows: Tensor<2>, part: usize) -> Tensor<2> {
        let device = &self.devices[part];
        match self.is_in_turn() {
            true => transfer_in_turn(rows, device),
            false => transfer(rows, device),
        }
    }

    /// Whether nothing but replays, each of which waits for the one before, has been launched since
    /// all devices had done what they were given.
    fn is_in_turn(&self) -> bool {
        self.done == Some(launches())
    }
}
