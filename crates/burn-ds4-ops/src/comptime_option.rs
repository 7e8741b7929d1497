//! An optional argument of a kernel, for which it is compiled with or without.

use cubecl::prelude::*;

/// CubeCL's option of the same name, with another key: what CubeCL derives for an enum hashes the
/// fields of a variant, and not which variant it is. The kernels with and without a scalar, or with
/// either of two tensors, would be one in a store that finds kernels by their hash, such as that
/// [on disk](crate::device::keep_kernels). Inside of kernels it is CubeCL's own.
#[derive(Clone, Copy)]
pub(crate) enum ComptimeOption<T: CubeType> {
    #[allow(dead_code, reason = "kernels are expanded from CubeCL's option")]
    None,
    #[allow(dead_code, reason = "kernels are expanded from CubeCL's option")]
    Some(T),
}

impl<T: CubeType> CubeType for ComptimeOption<T> {
    type ExpandType = ComptimeOptionExpand<T>;
}

impl<T: LaunchArg> LaunchArg for ComptimeOption<T> {
    type RuntimeArg = ComptimeOptionArgs<T>;
    type CompilationArg = Option<T::CompilationArg>;

    fn register(arg: Self::RuntimeArg, launcher: &mut KernelLauncher) -> Self::CompilationArg {
        match arg {
            ComptimeOptionArgs::Some(arg) => Some(T::register(arg, launcher)),
            ComptimeOptionArgs::None => None,
        }
    }

    fn expand(arg: &Self::CompilationArg, builder: &mut KernelBuilder) -> ComptimeOptionExpand<T> {
        match arg {
            Some(arg) => ComptimeOptionExpand::Some(T::expand(arg, builder)),
            None => ComptimeOptionExpand::None,
        }
    }
}

/// What kernels call, as the compiler sees it before they are expanded.
#[allow(
    non_snake_case,
    dead_code,
    reason = "kernels are expanded from CubeCL's option"
)]
impl<T: CubeType> ComptimeOption<T> {
    pub fn new_None() -> Self {
        Self::None
    }

    pub fn __expand_new_None(_: &Scope) -> ComptimeOptionExpand<T> {
        ComptimeOptionExpand::None
    }

    pub fn new_Some(value: T) -> Self {
        Self::Some(value)
    }

    pub fn __expand_new_Some(_: &Scope, value: T::ExpandType) -> ComptimeOptionExpand<T> {
        ComptimeOptionExpand::Some(value)
    }

    pub fn is_some(&self) -> bool {
        matches!(self, Self::Some(_))
    }

    pub fn is_none(&self) -> bool {
        !self.is_some()
    }

    pub fn as_ref(&self) -> ComptimeOption<&T> {
        match self {
            Self::Some(value) => ComptimeOption::Some(value),
            Self::None => ComptimeOption::None,
        }
    }

    pub fn as_mut(&mut self) -> ComptimeOption<&mut T> {
        match self {
            Self::Some(value) => ComptimeOption::Some(value),
            Self::None => ComptimeOption::None,
        }
    }

    pub fn map<U: CubeType>(self, f: impl FnOnce(T) -> U) -> ComptimeOption<U> {
        match self {
            Self::Some(value) => ComptimeOption::Some(f(value)),
            Self::None => ComptimeOption::None,
        }
    }

    pub fn unwrap(self) -> T {
        self.unwrap_or_else(|| panic!("no argument"))
    }

    pub fn unwrap_or_else(self, f: impl FnOnce() -> T) -> T {
        match self {
            Self::Some(value) => value,
            Self::None => f(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use cubecl::hash::StableHasher;

    use super::*;

    /// The part of a kernel's key that two optional arguments have.
    fn key(first: Option<u32>, second: Option<f32>) -> u128 {
        let settings = KernelSettings::new(
            CubeDim::new_single().into(),
            ExecutionMode::Unchecked,
            AddressType::U32,
        );
        let mut launcher = KernelLauncher::new(settings);
        let args = (
            ComptimeOption::<u32>::register(first.into(), &mut launcher),
            ComptimeOption::<f32>::register(second.into(), &mut launcher),
        );
        launcher.discard();
        StableHasher::hash_one(&args)
    }

    #[test]
    fn kernels_with_other_optional_arguments_have_other_keys() {
        let keys = [
            key(None, None),
            key(Some(1), None),
            key(None, Some(1.0)),
            key(Some(1), Some(1.0)),
        ];
        assert_eq!(HashSet::from(keys).len(), keys.len());
        // Their values are no part of it.
        assert_eq!(key(Some(2), None), keys[1]);
    }
}
