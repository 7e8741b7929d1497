//! Constraints: which tokens a text may have, as the host decides before each step.

use std::error::Error;
use std::fmt;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::results::Outcome;

/// Bits of a word of a mask.
const BITS: usize = 32;

/// Why a [`Constraint`] cannot go on.
pub type ConstraintError = Box<dyn Error + Send + Sync>;

/// Decides which tokens a text may have, given those before: those of a grammar, for instance.
///
/// A draft that it does not allow is rejected. A text has the same tokens with drafts and without.
///
/// # Example
///
/// ```
/// use ds4_model::generate::{Constraint, ConstraintError};
/// # #[cfg(feature = "flex")]
/// # use ds4_model::generate::{Engine, EngineConfig, Request};
/// # #[cfg(feature = "flex")]
/// # use ds4_model::pipeline::Pipeline;
///
/// /// Allows the tokens below a number.
/// #[derive(Clone, Debug)]
/// struct Below(u32);
///
/// impl Constraint for Below {
///     fn allow(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
///         (0..self.0).for_each(|id| mask[id as usize / 32] |= 1 << (id % 32));
///         Ok(())
///     }
///
///     fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
///         Ok(())
///     }
///
///     fn fork(&self) -> Box<dyn Constraint> {
///         Box::new(self.clone())
///     }
/// }
/// # #[cfg(feature = "flex")] {
/// # let device = burn::tensor::Device::flex();
/// # let pipeline = Pipeline::open("../../assets/ds4-tiny".as_ref(), &device)?;
/// # let mut engine = Engine::new(&pipeline.model, EngineConfig::default())?;
/// # let prompt = pipeline.encode("And God said,")?;
///
/// let constraint: Option<Box<dyn Constraint>> = Some(Box::new(Below(100)));
/// engine.add(Request { constraint, ..Request::new(&prompt, 4) })?;
/// let mut tokens = Vec::new();
/// while !engine.is_idle() {
///     for output in engine.step()? {
///         tokens.push(output.token?);
///     }
/// }
/// assert_eq!(tokens.len(), 4);
/// assert!(tokens.iter().all(|token| *token < 100));
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "guided_decoding")]
#[doc(alias = "structured_outputs")]
pub trait Constraint: fmt::Debug + Send {
    /// Allows tokens to come next: sets bit `id % 32` of word `id / 32` of `mask`, all of whose
    /// bits are 0 before. The end-of-sequence token is one like others: it is to be allowed where
    /// the text may end.
    ///
    /// # Errors
    ///
    /// If the text cannot go on. It ends with
    /// [`GenerateError::Constraint`](crate::generate::GenerateError::Constraint), as it does where
    /// nothing is allowed.
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError>;

    /// Takes the token that comes next, which is an allowed one. After the last token of a text,
    /// others may come that count for nothing.
    ///
    /// # Errors
    ///
    /// As [`allow`](Self::allow).
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// A copy that goes on from here by itself. The engine follows drafts with it.
    fn fork(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.fork()
    }
}

/// The constraint of a text in a lane.
#[derive(Clone, Debug)]
pub(super) struct LaneConstraint {
    constraint: Box<dyn Constraint>,
    /// Drafts that the next step verifies.
    drafts: Vec<u32>,
    /// Why no token is allowed.
    failure: Option<String>,
}

impl LaneConstraint {
    pub(super) fn new(constraint: Box<dyn Constraint>) -> Self {
        Self {
            constraint,
            drafts: Vec::new(),
            failure: None,
        }
    }

    /// Takes the tokens that the text has gained, and its drafts.
    fn accept(&mut self, tokens: &[i32], drafts: impl Iterator<Item = u32>) {
        self.drafts = drafts.collect();
        if self.failure.is_none() {
            let mut tokens = tokens.iter().map_while(|token| u32::try_from(*token).ok());
            let accepted = tokens.try_for_each(|token| self.constraint.accept(token));
            self.failure = accepted.err().map(|error| error.to_string());
        }
    }

    /// Writes the mask of each row: of the next token, and of the token after each draft. All of
    /// their bits are 0 before.
    fn write(&mut self, masks: &mut [u32], words: usize) {
        let (next, rest) = masks.split_at_mut(words);
        if self.failure.is_none() {
            let allowed = allow(self.constraint.as_mut(), next);
            self.failure = allowed.err().map(|error| error.to_string());
        }
        if self.failure.is_some() {
            next.fill(0);
            return;
        }
        if self.drafts.is_empty() {
            return;
        }
        let (mut constraint, mut before) = (self.constraint.fork(), next);
        for (draft, mask) in self.drafts.iter().zip(rest.chunks_exact_mut(words)) {
            let (word, bit) = (*draft as usize / BITS, *draft as usize % BITS);
            let is_allowed = before.get(word).is_some_and(|word| word >> bit & 1 == 1);
            // The rows after a draft that is rejected count for nothing.
            if !is_allowed || constraint.accept(*draft).is_err() {
                return;
            }
            if allow(constraint.as_mut(), mask).is_err() {
                mask.fill(0);
                return;
            }
            before = mask;
        }
    }
}

fn allow(constraint: &mut dyn Constraint, mask: &mut [u32]) -> Result<(), ConstraintError> {
    constraint.allow(mask)?;
    match mask.iter().any(|word| *word != 0) {
        true => Ok(()),
        false => Err("it allows no token".into()),
    }
}

/// The constraints of a group of lanes, and their masks on the device.
#[derive(Debug, Default)]
pub(super) struct Constraints {
    lanes: Vec<Option<LaneConstraint>>,
    tensors: Option<Masks>,
}

#[derive(Debug)]
struct Masks {
    /// The bits of words: `[lanes, 1 + drafts, words]`. Always in the same buffer, because it is
    /// part of a recording. Taken while it is written.
    words: Option<Tensor<3, Int>>,
    /// Each bit by itself: `[1, 1, 1, BITS]`. Kept, because an upload cannot be recorded.
    bits: Tensor<4, Int>,
}

impl Constraints {
    /// Lanes without a constraint.
    pub(super) fn new(lanes: usize) -> Self {
        Self {
            lanes: vec![None; lanes],
            tensors: None,
        }
    }

    /// Makes these lanes of those that there are, `None` for one that is vacant.
    pub(super) fn arrange(&mut self, lanes: &[Option<usize>]) {
        let mut own = |lane: &Option<usize>| self.lanes[(*lane)?].take();
        self.lanes = lanes.iter().map(&mut own).collect();
        self.tensors = None;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.iter().all(Option::is_none)
    }

    pub(super) fn set(&mut self, lane: usize, constraint: Option<LaneConstraint>) {
        self.lanes[lane] = constraint;
    }

    pub(super) fn take(&mut self, lane: usize) -> Option<LaneConstraint> {
        self.lanes[lane].take()
    }

    /// Why a lane's constraint allows no token.
    pub(super) fn failure(&self, lane: usize) -> Option<&str> {
        self.lanes[lane].as_ref()?.failure.as_deref()
    }

    /// Takes the outcome of a step.
    pub(super) fn accept(&mut self, outcome: &Outcome) {
        for (lane, own) in self.lanes.iter_mut().enumerate() {
            if let Some(own) = own {
                own.accept(outcome.tokens(lane), outcome.next_drafts(lane));
            }
        }
    }

    /// The same constraints, for a group of lanes that has to go back to here.
    pub(super) fn fork(&self) -> Self {
        Self {
            lanes: self.lanes.clone(),
            tensors: None,
        }
    }

    /// Uploads the masks of the next step, which has at most so many rows a lane.
    pub(super) fn upload(&mut self, rows: usize, vocabulary: usize, device: &Device) {
        let words = vocabulary.div_ceil(BITS);
        let mut masks = vec![0; self.lanes.len() * rows * words];
        for (own, masks) in self.lanes.iter_mut().zip(masks.chunks_mut(rows * words)) {
            match own {
                Some(own) => own.write(masks, words),
                None => masks.fill(u32::MAX),
            }
        }
        let shape = [self.lanes.len(), rows, words];
        let masks: Vec<i32> = masks.into_iter().map(|word| word as i32).collect();
        let new = Tensor::from_data(TensorData::new(masks, shape), (device, DType::I32));
        let tensors = self.tensors.get_or_insert_with(|| Masks::new(device));
        tensors.words = Some(match tensors.words.take() {
            None => new,
            Some(words) => words.slice_assign(shape.map(|size| 0..size), new),
        });
    }

    /// Logits with `-inf` for tokens that are not allowed: `[lanes, rows, vocabulary]`.
    pub(super) fn apply(&self, logits: Tensor<3>) -> Tensor<3> {
        let [lanes, rows, vocabulary] = logits.dims();
        let Masks { words, bits } = self.tensors.as_ref().expect("uploaded before the step");
        let masks = words.clone().expect("they are put back");
        let [.., words] = masks.dims();
        let shape = [lanes, rows, words, BITS];
        let masks = masks.narrow(1, 0, rows).reshape([lanes, rows, words, 1]);
        let masks = masks.expand(shape).bitwise_and(bits.clone().expand(shape));
        let forbidden = masks.equal_elem(0).reshape([lanes, rows, words * BITS]);
        logits.mask_fill(forbidden.narrow(2, 0, vocabulary), f32::NEG_INFINITY)
    }
}

impl Masks {
    fn new(device: &Device) -> Self {
        let bits: Vec<i32> = (0..BITS).map(|bit| 1 << bit).collect();
        let bits = TensorData::new(bits, [1, 1, 1, BITS]);
        Self {
            words: None,
            bits: Tensor::from_data(bits, (device, DType::I32)),
        }
    }
}
