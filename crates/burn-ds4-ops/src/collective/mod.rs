//! What several devices do together: sums, copies and rows of all of them.
//!
//! The devices of a [`DeviceGroup`] each have a rank. An operator takes a tensor of every device
//! and returns one on every device. All results have the same bits on all devices, whichever of
//! them computes them: floats are added in the order of the ranks.
//!
//! # Supported
//! - Any devices, the same one several times included: through the memory of the host.
//! - CUDA devices of one host that can access each other's memory, where kernels contain PTX: each
//!   device writes what it has into the memory of all others, waits for what they write and
//!   combines it, in one launch that can be recorded.
//!
//! # Order
//! On CUDA, one thread has to launch the operators of a group, in one order for all devices. A
//! launch for one rank alone, as while a device records, has to be followed by those for all
//! others, before anything waits for it.
//!
//! Threads write to different memory and do not change each other's results, but their exchanges
//! should not run at the same time on the same devices: two that each fill one of the devices wait
//! for each other until they [give up](DeviceGroup::check).

// The one place that knows which builds have kernels with PTX.
#[cfg_attr(
    not(all(feature = "cuda-llvm", not(feature = "fusion"))),
    path = "no_peer.rs"
)]
mod peer;
mod reference;

pub use crate::error::GroupError;
pub(crate) use peer::forget;

use std::fmt;
use std::sync::Arc;

use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Int, Tensor};

use crate::OpError;
use crate::kinds::Movable;
use crate::validation::{
    expect_device, expect_dtype, expect_float, expect_shape, expect_value, invalid,
};

/// Devices that compute together.
#[derive(Clone)]
pub struct DeviceGroup {
    devices: Arc<[Device]>,
    route: GroupRoute,
}

/// How the devices of a group exchange what they have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupRoute {
    /// There is one device.
    Alone,
    /// Each device writes to the memory of the others.
    Memory,
    /// Through the memory of the host, which waits.
    Host {
        /// Why it is not the first.
        reason: String,
    },
}

/// What a rank has of the tensors of all ranks in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Combine {
    /// Their sum.
    Sum,
    /// That of one rank.
    Root(usize),
    /// All of them, one after the other.
    Gather,
}

impl fmt::Debug for DeviceGroup {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("DeviceGroup");
        let debug = debug.field("devices", &self.devices);
        debug.field("route", &self.route).finish()
    }
}

impl DeviceGroup {
    /// Groups devices, of which the first has rank 0. Lets CUDA devices access each other's memory,
    /// for as long as the process lives, if they can.
    ///
    /// # Errors
    ///
    /// [`OpError`] if there is no device.
    pub fn new(devices: &[Device]) -> Result<Self, OpError> {
        let route = match devices.len() {
            0 => return Err(invalid("devices", "at least 1", 0)),
            1 => GroupRoute::Alone,
            _ => match peer::enable(devices) {
                Ok(()) => GroupRoute::Memory,
                Err(reason) => GroupRoute::Host { reason },
            },
        };
        Ok(Self {
            devices: devices.into(),
            route,
        })
    }

    /// The devices, in the order of their ranks.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// How they exchange what they have.
    pub fn route(&self) -> &GroupRoute {
        &self.route
    }

    /// Whether ranks can be launched one by one, which a recording needs.
    pub fn is_recordable(&self) -> bool {
        matches!(self.route, GroupRoute::Alone | GroupRoute::Memory)
    }

    /// The sum of the partials of all ranks, on each of them.
    ///
    /// Added in f32 in the order of the ranks, and rounded once.
    ///
    /// # Arguments
    ///
    /// * `first` - the rank of the first partial. Others than all ranks can only be given where the
    ///   group [is recordable](Self::is_recordable).
    /// * `partials` - of this rank and those after it, f32 / f16 / bf16, of one shape and dtype.
    ///
    /// # Special values
    ///
    /// On a device that has [given up waiting](Self::check), all sums are NaN.
    ///
    /// # Errors
    ///
    /// [`OpError`] for a dtype, shape, device or rank that does not fit, or where
    /// [`prepare`](Self::prepare) fails.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor, TensorData};
    /// use burn_ds4_ops::collective::DeviceGroup;
    ///
    /// // The same device twice computes what two devices would.
    /// let device = Device::flex();
    /// let group = DeviceGroup::new(&[device.clone(), device.clone()])?;
    /// let partials = [[1.0, 2.0], [10.0, 20.0]].map(|row| Tensor::<1>::from_data(row, &device));
    /// let sums = group.all_reduce(0, partials.to_vec())?;
    /// assert_eq!(sums.len(), 2);
    /// for sum in sums {
    ///     sum.into_data().assert_eq(&TensorData::from([11.0_f32, 22.0]), true);
    /// }
    /// # }
    /// # Ok::<(), burn_ds4_ops::OpError>(())
    /// ```
    #[doc(alias = "custom_all_reduce")]
    pub fn all_reduce<const D: usize>(
        &self,
        first: usize,
        partials: Vec<Tensor<D>>,
    ) -> Result<Vec<Tensor<D>>, OpError> {
        for partial in &partials {
            expect_float("partials", partial)?;
        }
        self.exchange("partials", first, partials, Combine::Sum)
    }

    /// The parts of all ranks on each of them, one after the other along the first dimension.
    ///
    /// # Arguments
    ///
    /// As those of [`all_reduce`](Self::all_reduce).
    ///
    /// # Special values
    ///
    /// On a device that has [given up waiting](Self::check), everything is NaN.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor, TensorData};
    /// use burn_ds4_ops::collective::DeviceGroup;
    ///
    /// let device = Device::flex();
    /// let group = DeviceGroup::new(&[device.clone(), device.clone()])?;
    /// let parts = [[1.0, 2.0], [3.0, 4.0]].map(|row| Tensor::<1>::from_data(row, &device));
    /// for whole in group.all_gather(0, parts.to_vec())? {
    ///     whole.into_data().assert_eq(&TensorData::from([1.0_f32, 2.0, 3.0, 4.0]), true);
    /// }
    /// # }
    /// # Ok::<(), burn_ds4_ops::OpError>(())
    /// ```
    pub fn all_gather<const D: usize>(
        &self,
        first: usize,
        parts: Vec<Tensor<D>>,
    ) -> Result<Vec<Tensor<D>>, OpError> {
        for part in &parts {
            expect_float("parts", part)?;
        }
        self.exchange("parts", first, parts, Combine::Gather)
    }

    /// What the rank `root` has, on each rank.
    ///
    /// # Arguments
    ///
    /// * `root` - a rank of the group.
    /// * `first` - as that of [`all_reduce`](Self::all_reduce).
    /// * `tensors` - of this rank and those after it, i32 or i64, of one shape and dtype. What
    ///   others than `root` have is not read.
    ///
    /// # Special values
    ///
    /// On a device that has [given up waiting](Self::check), everything is 0.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce), and for a `root` that is no rank.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_ds4_ops::collective::DeviceGroup;
    ///
    /// let device = Device::flex();
    /// let group = DeviceGroup::new(&[device.clone(), device.clone()])?;
    /// let ids = [[1, 2], [7, 8]].map(|row| Tensor::<1, Int>::from_ints(row, &device));
    /// // Rank 1 says what all have.
    /// for ids in group.broadcast(1, 0, ids.to_vec())? {
    ///     assert_eq!(ids.into_data().iter::<i32>().collect::<Vec<_>>(), [7, 8]);
    /// }
    /// # }
    /// # Ok::<(), burn_ds4_ops::OpError>(())
    /// ```
    pub fn broadcast<const D: usize>(
        &self,
        root: usize,
        first: usize,
        tensors: Vec<Tensor<D, Int>>,
    ) -> Result<Vec<Tensor<D, Int>>, OpError> {
        let ranks = self.devices.len();
        expect_value(root < ranks, "root", root, format_args!("below {ranks}"))?;
        for tensor in &tensors {
            let accepted = [DType::I32, DType::I64];
            expect_dtype("tensors", "I32 or I64", tensor, &accepted)?;
        }
        self.exchange("tensors", first, tensors, Combine::Root(root))
    }

    /// Makes what the calling thread needs to launch operators, unless it is there: the first
    /// operator does so otherwise. Each device gives 8 MiB for each rank.
    ///
    /// # Errors
    ///
    /// [`GroupError::NoInbox`] if a device has no memory for that.
    pub fn prepare(&self) -> Result<(), GroupError> {
        match self.route {
            GroupRoute::Memory => peer::prepare(&self.devices),
            GroupRoute::Alone | GroupRoute::Host { .. } => Ok(()),
        }
    }

    /// Waits for what the calling thread has launched, and tells whether a device has given up
    /// waiting for another.
    ///
    /// Such a device waits no more, and sends nothing: the others give up, too. This begins anew
    /// for what is launched later; what is recorded has to be recorded again.
    ///
    /// # Errors
    ///
    /// If one has.
    pub fn check(&self) -> Result<(), GroupError> {
        match self.route {
            GroupRoute::Memory => peer::check(&self.devices),
            GroupRoute::Alone | GroupRoute::Host { .. } => Ok(()),
        }
    }

    fn exchange<const D: usize, K: Exchanged>(
        &self,
        argument: &'static str,
        first: usize,
        tensors: Vec<Tensor<D, K>>,
        combine: Combine,
    ) -> Result<Vec<Tensor<D, K>>, OpError> {
        self.check_tensors(argument, first, &tensors)?;
        let is_empty = tensors[0].dims().contains(&0);
        Ok(match self.route {
            _ if is_empty => tensors,
            GroupRoute::Alone => tensors,
            GroupRoute::Memory => peer::exchange(&self.devices, first, tensors, combine)?,
            GroupRoute::Host { .. } => reference::exchange(&self.devices, tensors, combine),
        })
    }

    fn check_tensors<const D: usize, K: Basic>(
        &self,
        argument: &'static str,
        first: usize,
        tensors: &[Tensor<D, K>],
    ) -> Result<(), OpError> {
        let (ranks, count) = (self.devices.len(), tensors.len());
        let least = match self.is_recordable() {
            true => 1,
            false => ranks,
        };
        if !(least..=ranks).contains(&count) {
            let expected = match least == ranks {
                true => format!("{ranks} tensors"),
                false => format!("{least} to {ranks} tensors"),
            };
            return Err(invalid(argument, expected, count));
        }
        let last = ranks - count;
        expect_value(
            first <= last,
            "first",
            first,
            format_args!("at most {last}"),
        )?;
        let like = &tensors[0];
        for (tensor, device) in tensors.iter().zip(&self.devices[first..]) {
            expect_shape(argument, tensor.dims(), like.dims())?;
            expect_dtype(argument, "one dtype", tensor, &[like.dtype()])?;
            expect_device(argument, &tensor.device(), "devices", device)?;
        }
        let bytes = like.shape().num_elements() * like.dtype().size();
        let fits = self.route != GroupRoute::Memory || bytes.is_multiple_of(WORD);
        expect_value(fits, argument, bytes, "whole words of 4 bytes")
    }
}

/// Bytes of what devices write to each other at least.
const WORD: usize = 4;

/// Kinds of tensors that devices exchange.
trait Exchanged: Movable {
    /// The sum, added in the order of the tensors.
    fn sum<const D: usize>(tensors: impl Iterator<Item = Tensor<D, Self>>) -> Tensor<D, Self>;
}

macro_rules! exchanged {
    ($kind:ty, $widened:expr) => {
        impl Exchanged for $kind {
            fn sum<const D: usize>(
                tensors: impl Iterator<Item = Tensor<D, Self>>,
            ) -> Tensor<D, Self> {
                let mut tensors = tensors.peekable();
                let dtype = tensors.peek().map(Tensor::dtype);
                let dtype = dtype.expect("a tensor of each rank");
                let wide = tensors.map(|tensor| tensor.cast($widened(dtype)));
                let sum = wide.reduce(|sum, tensor| sum + tensor);
                sum.expect("a tensor of each rank").cast(dtype)
            }
        }
    };
}

exchanged!(burn::tensor::Float, |_| DType::F32);
exchanged!(Int, |dtype| dtype);
