use std::ops::Range;

/// Why a model cannot be divided among devices as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// No device is named.
    #[error("devices: none is named")]
    NoDevice,
    /// A device is named twice.
    #[error("devices: {device} is named twice")]
    Repeated {
        /// The device.
        device: String,
    },
    /// Devices are of several architectures, so that the bits of a text would depend on the split.
    #[error("devices: {device} is a {architecture}, {first} a {expected}: they must be alike")]
    Unlike {
        /// A device.
        device: String,
        /// What kernels are compiled for there.
        architecture: String,
        /// The first device.
        first: String,
        /// What kernels are compiled for on the first device.
        expected: String,
    },
    /// There are more devices than layers.
    #[error(
        "devices: {devices} of them cannot share {layers} layers, {device} would be left without"
    )]
    TooManyDevices {
        /// Number of devices.
        devices: usize,
        /// Number of layers.
        layers: usize,
        /// The first device without a layer.
        device: String,
    },
    /// A split has not one number for each device.
    #[error("split {split:?}: it has {} numbers, there are {devices} devices", split.len())]
    SplitCount {
        /// The split.
        split: Vec<usize>,
        /// Number of devices.
        devices: usize,
    },
    /// A split leaves a device without a layer.
    #[error("split {split:?}: it has no layer for {device}")]
    EmptyRun {
        /// The split.
        split: Vec<usize>,
        /// The device.
        device: String,
    },
    /// A split is of another number of layers.
    #[error("split {split:?}: it has {sum} layers, the model has {layers}")]
    SplitSum {
        /// The split.
        split: Vec<usize>,
        /// Its sum.
        sum: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// Layers that share rows or picks would be on several devices, or parts of layers of V4.1.
    #[error(
        "layers of V4.1 that share rows (kv_source_layer_ids) stay on one device, and whole: \
         devices can begin with the layers {begins:?}"
    )]
    SharedRows {
        /// The layers that devices can begin with.
        begins: Vec<usize>,
    },
    /// Devices cannot have equal parts of every layer.
    #[error(
        "{what} ({size}) cannot be divided among {devices} devices, each with a multiple of \
         {multiple}"
    )]
    Indivisible {
        /// Field of the configuration, or what follows from fields.
        what: &'static str,
        /// Its value.
        size: usize,
        /// Number of devices.
        devices: usize,
        /// What each device must have a multiple of, so that no block of weights with one scale is
        /// shared.
        multiple: usize,
    },
    /// Layers of each device are named, but each has a part of every layer.
    #[error("split {split:?}: each device has a part of every layer")]
    SplitTensor {
        /// The split.
        split: Vec<usize>,
    },
    /// The layers are in parts, which cannot be moved.
    #[error("the layers are in parts on several devices, and cannot be placed again")]
    Divided,
    /// A device has not taken what is to be there, for example because its memory is full.
    #[error("{device}: it has not taken its part of the model: {reason}")]
    Refused {
        /// What the device is called.
        device: String,
        /// What the device says.
        reason: String,
    },
    /// A device has too little memory for its layers.
    #[error(
        "{device}: layers {} to {} take {weights} bytes of weights and {cache} of caches, the \
         device has {memory}",
        layers.start,
        layers.end - 1
    )]
    OutOfMemory {
        /// The device.
        device: String,
        /// Its layers.
        layers: Range<usize>,
        /// Bytes of their weights, and of what else is on the device.
        weights: usize,
        /// Bytes of their caches.
        cache: usize,
        /// Bytes that the device has.
        memory: usize,
    },
}
