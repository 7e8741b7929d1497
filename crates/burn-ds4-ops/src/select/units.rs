use crate::caps::Target;

/// The units of a cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CubeUnits {
    /// Number of units: a power of two.
    pub cube: u32,
    /// Lanes of a plane.
    pub plane: u32,
    /// Instructions that the kernel may use.
    pub target: Target,
}

impl CubeUnits {
    pub(crate) fn planes(&self) -> u32 {
        self.cube / self.plane
    }
}
