use burn::tensor::DType;

/// Why an operator rejects an argument: the argument by name, and its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// A tensor of the wrong dtype.
    #[error("`{argument}` has dtype {actual:?}, expected {expected}")]
    DtypeMismatch {
        /// Name of the argument.
        argument: &'static str,
        /// The dtypes that are accepted.
        expected: &'static str,
        /// The dtype it has.
        actual: DType,
    },
    /// A tensor of the wrong shape.
    #[error("`{argument}` has shape {actual:?}, expected {expected:?}")]
    ShapeMismatch {
        /// Name of the argument.
        argument: &'static str,
        /// The shape that the other arguments ask for.
        expected: Vec<usize>,
        /// The shape it has.
        actual: Vec<usize>,
    },
    /// A number outside its range.
    #[error("`{argument}` is {actual}, expected {expected}")]
    InvalidValue {
        /// Name of the argument.
        argument: &'static str,
        /// The accepted range.
        expected: String,
        /// The value given.
        actual: usize,
    },
    /// A fraction outside its range, or no number at all.
    #[error("`{argument}` is {actual}, expected {expected}")]
    InvalidFloat {
        /// Name of the argument.
        argument: &'static str,
        /// The accepted range.
        expected: &'static str,
        /// The value given, in decimal.
        actual: String,
    },
    /// Clusters that are not of the same size.
    #[error(
        "`{argument}` gives {count} clusters a number of rows outside {expected}: {}",
        shown(clusters)
    )]
    UnbalancedClusters {
        /// Name of the argument.
        argument: &'static str,
        /// The accepted numbers of rows.
        expected: String,
        /// How many clusters have another.
        count: usize,
        /// The first of them, each with its number of rows.
        clusters: Vec<(usize, usize)>,
    },
    /// Two tensors that must share a device and do not.
    #[error("`{argument}` is on {actual}, expected {expected} like `{other}`")]
    DeviceMismatch {
        /// Name of the argument.
        argument: &'static str,
        /// The argument that decides the device.
        other: &'static str,
        /// Device of `other`.
        expected: String,
        /// Device of `argument`.
        actual: String,
    },
    /// An output dtype that the device does not compute in.
    #[error("`{argument}` is {dtype:?}, which {device} does not support")]
    UnsupportedDtype {
        /// Name of the argument.
        argument: &'static str,
        /// The dtype asked for.
        dtype: DType,
        /// The device of the input tensors.
        device: String,
    },
    /// Devices cannot exchange what they have.
    #[error(transparent)]
    Group(#[from] GroupError),
}

/// Why the results of a group are worth nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// Devices have given up waiting for another.
    #[error("{} waited too long for what the other devices of the group send", devices.join(", "))]
    TimedOut {
        /// Those that have given up.
        devices: Vec<String>,
    },
    /// A device has no memory for what the others send.
    #[error("{device} has no memory for what other devices send: {reason}")]
    NoInbox {
        /// The device.
        device: String,
        /// What the device says.
        reason: String,
    },
    /// A device does not say whether it has given up.
    #[error("{device} does not tell whether it has received everything: {reason}")]
    Lost {
        /// The device.
        device: String,
        /// What the device says.
        reason: String,
    },
}

fn shown(clusters: &[(usize, usize)]) -> String {
    let clusters = clusters
        .iter()
        .map(|(cluster, rows)| format!("cluster {cluster} has {rows}"));
    clusters.collect::<Vec<_>>().join(", ")
}
