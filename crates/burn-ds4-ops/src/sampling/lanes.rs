//! The parameters of each lane, as data on the device.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::layout::{
    BIAS, BIAS_ID, BIASES, FARTHEST, FREQUENCY, LAST, PENALISED, PRESENCE, RATE, REPETITION, SEED,
    TOP_K, TOP_P, WIDTH,
};
use super::params::{LaneParams, Penalties};
use super::validation;
use super::weight::WeightFilter;
use crate::OpError;
use crate::validation::{expect_device, expect_shape};

/// The parameters of all lanes of a batch, on the device.
///
/// Their size does not depend on their values, and no launch does. So steps that are recorded in a
/// graph see the values that [`set_lane`](Self::set_lane) writes, unless there is a clone: then the
/// next write copies the parameters.
#[derive(Clone, Debug)]
pub struct BatchParams {
    lanes: usize,
    vocabulary: usize,
    /// Taken while they are written, so that they stay in place.
    tables: Option<LaneTables>,
}

/// The tables of all lanes, one lane after the other; see [`layout`](super::layout).
#[derive(Clone, Debug)]
pub(super) struct LaneTables {
    pub floats: Tensor<1>,
    pub words: Tensor<1, Int>,
}

impl LaneTables {
    fn of(rows: &[([f32; WIDTH], [i32; WIDTH])], device: &Device) -> Self {
        let (floats, words): (Vec<_>, Vec<_>) = rows.iter().copied().unzip();
        let size = [rows.len() * WIDTH];
        Self {
            floats: Tensor::from_data(TensorData::new(floats.concat(), size), (device, DType::F32)),
            words: Tensor::from_data(TensorData::new(words.concat(), size), (device, DType::I32)),
        }
    }
}

impl BatchParams {
    /// The parameters of as many lanes as there are `lanes`, for logits of `vocabulary` columns.
    ///
    /// # Errors
    ///
    /// [`OpError`] for the first parameter that is out of range.
    pub fn new(lanes: &[LaneParams], vocabulary: usize, device: &Device) -> Result<Self, OpError> {
        let rows = lanes.iter().map(|params| row(params, vocabulary));
        let rows: Vec<_> = rows.collect::<Result<_, _>>()?;
        Ok(Self {
            lanes: lanes.len(),
            vocabulary,
            tables: Some(LaneTables::of(&rows, device)),
        })
    }

    /// Sets the parameters of one lane, in place.
    ///
    /// # Errors
    ///
    /// [`OpError`] for a parameter that is out of range, and for a lane that does not exist.
    pub fn set_lane(&mut self, lane: usize, params: &LaneParams) -> Result<(), OpError> {
        validation::check_lane(lane, self.lanes)?;
        let row = row(params, self.vocabulary)?;
        let LaneTables { floats, words } = self.tables.take().expect("they are put back");
        let own = LaneTables::of(&[row], &floats.device());
        let columns = lane * WIDTH..(lane + 1) * WIDTH;
        self.tables = Some(LaneTables {
            floats: floats.slice_assign([columns.clone()], own.floats),
            words: words.slice_assign([columns], own.words),
        });
        Ok(())
    }

    /// The number of lanes.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// The number of columns that the logits have.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Checks logits, whose first dimension is lanes, and whether the parameters are for them.
    pub(super) fn check<const D: usize>(&self, logits: &Tensor<D>) -> Result<(), OpError> {
        validation::check_logits(logits)?;
        let own = [self.lanes, self.vocabulary];
        let expected = [logits.dims()[0], logits.dims()[D - 1]];
        expect_shape("params", own, expected)?;
        expect_device("params", &self.device(), "logits", &logits.device())
    }

    fn device(&self) -> Device {
        self.tables().floats.device()
    }

    pub(super) fn tables(&self) -> LaneTables {
        self.tables.clone().expect("they are put back")
    }
}

/// A lane's row of both tables.
fn row(params: &LaneParams, vocabulary: usize) -> Result<([f32; WIDTH], [i32; WIDTH]), OpError> {
    validation::check_lane_params(params, vocabulary)?;
    let LaneParams {
        sampling,
        penalties,
        logit_bias,
        seed,
    } = params;
    let (mut floats, mut words) = ([0.0; WIDTH], [0; WIDTH]);
    floats[REPETITION] = penalties.repetition;
    floats[PRESENCE] = penalties.presence;
    floats[FREQUENCY] = penalties.frequency;
    words[PENALISED] = i32::from(*penalties != Penalties::default());
    words[SEED[0]] = *seed as i32;
    words[SEED[1]] = (seed >> 32) as i32;
    if sampling.temperature > 0.0 {
        let filter = WeightFilter::of(sampling, vocabulary);
        floats[RATE] = filter.rate;
        floats[FARTHEST] = filter.farthest;
        words[TOP_K] = filter.top_k as i32;
        words[TOP_P] = filter.top_p as i32;
        words[LAST] = filter.last as i32;
    }
    words[BIASES] = logit_bias.len() as i32;
    words[BIAS_ID..].fill(-1);
    for (entry, &(token, bias)) in logit_bias.iter().enumerate() {
        words[BIAS_ID + entry] = token as i32;
        floats[BIAS + entry] = bias;
    }
    Ok((floats, words))
}
