//! A benchmark case: an operator at one shape, variant and dtype.

use std::any::Any;

use burn::tensor::{DType, Device, Int, Tensor};

/// Makes a set of inputs from a seed.
pub type Build = dyn Fn(&Device, u32) -> Prepared;

/// An operator at one shape, in one variant, with inputs of one dtype.
pub struct Case {
    /// The public function's name.
    pub op: &'static str,
    /// Dimensions by the names that tables of results use.
    pub shape: Vec<(&'static str, usize)>,
    /// The way in which the operator is called, where there are several.
    pub variant: &'static str,
    /// The dtype of the largest input. A device without it skips the case.
    pub dtype: DType,
    /// The fewest bytes that the operator must move: the part of each input that it needs, once,
    /// and each output once.
    pub bytes: usize,
    /// Floating-point operations, where they could be the limit.
    pub flops: Option<u64>,
    /// Bytes of one set of inputs. The number of sets that exceed the cache follows from it.
    pub input_bytes: usize,
    /// Draws a set of inputs from a seed and puts it on a device.
    pub build: Box<Build>,
}

impl Case {
    /// `op/shape/variant/dtype`, which filters are matched against.
    pub fn id(&self) -> String {
        let shape: Vec<String> = self.shape.iter().map(|(n, v)| format!("{n}={v}")).collect();
        let (op, variant, dtype) = (self.op, self.variant, self.dtype_name());
        format!("{op}/{}/{variant}/{dtype}", shape.join(","))
    }

    /// `f32`, `bf16` and so on.
    pub fn dtype_name(&self) -> String {
        format!("{:?}", self.dtype).to_lowercase()
    }
}

/// One set of inputs on a device, with the call that is timed and the check of what it returns.
pub struct Prepared(Box<dyn Set>);

impl Prepared {
    /// `run` calls the operator and reads nothing back. `check` panics if the outputs are wrong.
    pub fn new<O: Outputs>(run: impl Fn() -> O + 'static, check: impl Fn(O) + 'static) -> Self {
        Self(Box::new(Typed { run, check }))
    }

    /// Calls the operator. The result owns the outputs.
    pub fn run(&self) -> Box<dyn Any> {
        self.0.run()
    }

    /// Panics if the outputs of [`run`](Self::run) are wrong.
    pub fn check(&self, outputs: Box<dyn Any>) {
        self.0.check(outputs);
    }

    /// Overwrites the outputs of [`run`](Self::run) and frees them. The next call is likely to be
    /// given the same memory, so that an element that it does not write is noticed.
    pub fn poison(&self, outputs: Box<dyn Any>) {
        self.0.poison(outputs);
    }
}

trait Set {
    fn run(&self) -> Box<dyn Any>;
    fn check(&self, outputs: Box<dyn Any>);
    fn poison(&self, outputs: Box<dyn Any>);
}

struct Typed<R, C> {
    run: R,
    check: C,
}

fn own<O: 'static>(outputs: Box<dyn Any>) -> O {
    *outputs.downcast().expect("outputs of this very set")
}

impl<O: Outputs, R: Fn() -> O, C: Fn(O)> Set for Typed<R, C> {
    fn run(&self) -> Box<dyn Any> {
        Box::new((self.run)())
    }

    fn check(&self, outputs: Box<dyn Any>) {
        (self.check)(own(outputs));
    }

    fn poison(&self, outputs: Box<dyn Any>) {
        own::<O>(outputs).poison();
    }
}

/// What an operator returns.
pub trait Outputs: 'static {
    /// Fills the memory with a value that no operator returns.
    fn poison(self);
}

// Burn computes in place where nobody else holds the tensor.
impl<const D: usize> Outputs for Tensor<D> {
    fn poison(self) {
        drop(self.mul_scalar(f32::NAN));
    }
}

impl<const D: usize> Outputs for Tensor<D, Int> {
    fn poison(self) {
        drop(self.mul_scalar(0).sub_scalar(7_777_777));
    }
}

/// For cases that keep the updated tensors themselves.
impl Outputs for () {
    fn poison(self) {}
}

impl<A: Outputs, B: Outputs> Outputs for (A, B) {
    fn poison(self) {
        self.0.poison();
        self.1.poison();
    }
}
