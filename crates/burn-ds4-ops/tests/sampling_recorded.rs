//! A recorded step of lanes sees the parameters and texts that lanes get later.

use std::cell::RefCell;

use burn::backend::{Backend, Dispatch};
use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::sampling::{
    BatchParams, LaneParams, Penalties, SamplingParams, TokenCounts, apply_penalties, sample,
};

use super::common::{devices, floats, integer_values, integers};

/// Columns of a row that one cube works on, and of one that is divided.
const COLUMNS: [usize; 2] = [8, 8192];

/// The inputs of a step, and what it updates.
struct Step {
    logits: Tensor<3>,
    drafts: Tensor<2, Int>,
    positions: Tensor<1, Int>,
    params: RefCell<BatchParams>,
    counts: RefCell<TokenCounts>,
}

impl Step {
    /// Two lanes whose most likely tokens are 0 and 1, a little less.
    fn new(columns: usize, device: &Device) -> Self {
        let mut row = vec![0.0; columns];
        row[..2].copy_from_slice(&[2.5, 2.0]);
        let params = vec![LaneParams::default(); 2];
        let params = BatchParams::new(&params, columns, device).expect("parameters in range");
        Self {
            logits: floats(&row.repeat(2), [2, 1, columns], device),
            drafts: Tensor::zeros([2, 0], device),
            positions: integers(&[0, 0], [2], device),
            params: RefCell::new(params),
            counts: RefCell::new(TokenCounts::new(2, columns, device)),
        }
    }

    fn run(&self) -> Tensor<1, Int> {
        let (params, counts) = (self.params.borrow(), &mut *self.counts.borrow_mut());
        let (logits, drafts) = (self.logits.clone(), self.drafts.clone());
        let columns = params.vocabulary();
        let logits = apply_penalties(logits, drafts, &params, counts);
        let logits = logits.expect("arguments that fit").reshape([2, columns]);
        let tokens = sample(logits, &params, self.positions.clone());
        let tokens = tokens.expect("arguments that fit");
        let counted = counts.count(tokens.clone().reshape([2, 1]));
        counted.expect("tokens that fit");
        tokens
    }

    fn set(&self, lane: usize, params: LaneParams) {
        let set = self.params.borrow_mut().set_lane(lane, &params);
        set.expect("parameters in range");
        let reset = self.counts.borrow_mut().reset_lane(lane, &[], &[]);
        reset.expect("a lane");
    }
}

fn a_recorded_step_sees_what_lanes_get_later() {
    if cfg!(feature = "fusion") {
        eprintln!("skipped: fusion does not promise to write in place");
        return;
    }
    // Flex records nothing.
    let recording = devices().iter().filter(|device| device.0 != "flex");
    for ((name, device), columns) in recording.flat_map(|one| COLUMNS.map(|columns| (one, columns)))
    {
        let step = Step::new(columns, device);
        let dispatch = device.as_dispatch();
        Dispatch::graph_prepare(dispatch).expect("a device that records");
        // So that there is memory for the recording.
        for _ in 0..2 {
            step.run();
            Dispatch::sync(dispatch).expect("a device that works");
        }
        Dispatch::graph_start_capture(dispatch).expect("a device that records");
        let tokens = step.run();
        let graph = Dispatch::graph_stop_capture(dispatch).expect("a step that can be recorded");
        let replay = || {
            // SAFETY: the step and its tokens are alive, and of this thread.
            unsafe { Dispatch::graph_replay(dispatch, &graph) }.expect("a recording that replays");
            integer_values(tokens.clone())
        };
        let frequent = LaneParams {
            penalties: Penalties {
                frequency: 1.0,
                ..Penalties::default()
            },
            ..LaneParams::default()
        };
        step.set(1, frequent.clone());
        let steps = [replay(), replay(), replay()];
        assert_eq!(steps, [[0, 0], [0, 1], [0, 0]], "{name}, {columns} columns");
        step.set(1, frequent);
        step.set(
            0,
            LaneParams {
                logit_bias: vec![(5, 9.0)],
                ..LaneParams::default()
            },
        );
        assert_eq!(
            [replay(), replay()],
            [[5, 0], [5, 1]],
            "{name}, {columns} columns"
        );
        step.set(
            1,
            LaneParams {
                sampling: SamplingParams {
                    temperature: 1.0,
                    top_k: 1,
                    ..SamplingParams::default()
                },
                logit_bias: vec![(0, f32::NEG_INFINITY)],
                ..LaneParams::default()
            },
        );
        assert_eq!(replay(), [5, 1], "{name}, {columns} columns");
    }
}

catalogue![a_recorded_step_sees_what_lanes_get_later];
