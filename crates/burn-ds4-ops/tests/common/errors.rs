//! Arguments that an operator accepts, and what it says of one that is changed.

use burn::tensor::Device;
use burn_ds4_ops::OpError;

use super::{assert_each_refused, assert_on_another_device, devices, two_devices};

/// The arguments of an operator.
pub trait Arguments: Sized {
    type Output;

    /// Those that it accepts.
    fn new(device: &Device) -> Self;

    fn run(self) -> Result<Self::Output, OpError>;

    /// Fails unless every device refuses what is changed by this message, and accepts the rest.
    #[track_caller]
    fn refused(change: impl Fn(&mut Self, &Device), message: &str) {
        for (_, device) in devices() {
            let change = |arguments: &mut Self| change(arguments, device);
            assert_each_refused(|| Self::new(device), Self::run, &[(change, message)]);
        }
    }

    /// Fails unless what is changed to be on another device is refused, by its name and that of the
    /// argument whose device it must have.
    #[track_caller]
    fn refused_device(named: [&str; 2], change: impl Fn(&mut Self, &Device)) {
        let Some([first, second]) = two_devices() else {
            return;
        };
        let mut arguments = Self::new(first);
        change(&mut arguments, second);
        assert_on_another_device(arguments.run(), named);
    }
}
