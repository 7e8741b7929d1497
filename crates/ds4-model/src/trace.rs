//! Recording of intermediate tensors, for tests against reference implementations and for
//! debugging.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use burn::tensor::{Tensor, TensorData, kind::Basic};

/// Collects intermediate tensors by name, or does nothing at all.
///
/// A recording trace reads every recorded tensor back to the host, which is slow; one that is
/// [off](Self::off) costs nothing.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use ds4_model::{router::RouterConfig, trace::Trace};
///
/// let device = Device::flex();
/// let router = RouterConfig::new(4, 8, 2).init_score(&device);
/// let trace = Trace::recording();
/// let x = Tensor::ones([1, 4], &device);
/// let routing = router.forward(x, Tensor::from_ints([0], &device), None, &trace.scope("router"));
/// let records = trace.take();
/// records["router.ids"].assert_eq(&routing.ids.into_data(), true);
/// assert_eq!(records["router.logits"].shape(), &burn::tensor::Shape::from([1, 8]));
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Trace {
    records: Option<Rc<RefCell<BTreeMap<String, TensorData>>>>,
    prefix: String,
}

impl Trace {
    /// A trace that records nothing.
    pub fn off() -> Self {
        Self::default()
    }

    /// A trace that records everything.
    pub fn recording() -> Self {
        Self {
            records: Some(Rc::default()),
            prefix: String::new(),
        }
    }

    /// The same trace, with `name` as a prefix of all names.
    pub fn scope(&self, name: &str) -> Self {
        match &self.records {
            None => Self::off(),
            Some(records) => Self {
                records: Some(records.clone()),
                prefix: format!("{}{name}.", self.prefix),
            },
        }
    }

    /// Records `tensor` as `name`, replacing an earlier record of that name.
    pub fn record<const D: usize, K: Basic>(&self, name: &str, tensor: &Tensor<D, K>) {
        if let Some(records) = &self.records {
            let data = tensor.to_data();
            // A copy: on a device that shares the host's memory, the data may be the tensor's own
            // buffer, which a later operation writes in place.
            let data = TensorData::from_bytes_vec(
                data.as_bytes().to_vec(),
                data.shape().clone(),
                data.dtype(),
            );
            records
                .borrow_mut()
                .insert(format!("{}{name}", self.prefix), data);
        }
    }

    /// Records as `name` the tensor that `tensor` returns. `tensor` is not called if nothing is
    /// recorded.
    pub fn record_with<const D: usize, K: Basic>(
        &self,
        name: &str,
        tensor: impl FnOnce() -> Tensor<D, K>,
    ) {
        if self.records.is_some() {
            self.record(name, &tensor());
        }
    }

    /// Takes everything recorded so far, by full name.
    pub fn take(&self) -> BTreeMap<String, TensorData> {
        match &self.records {
            None => BTreeMap::new(),
            Some(records) => records.take(),
        }
    }
}
