use crate::checkpoint::Loader;

use super::{checkpoint_of, stored, stored_f32};

#[test]
fn bytes_are_reported_up_to_the_total() {
    let checkpoint = checkpoint_of(&[
        stored_f32("norm", &[2], &[1.0, 2.0]),
        stored("w.weight", "F8_E4M3", &[2, 3], &[0; 6]),
        stored("w.scale", "F8_E8M0", &[1, 1], &[127]),
        stored("ids", "I64", &[1], &[0; 8]),
        stored_f32("mtp.0.head.weight", &[1], &[1.0]),
        stored_f32("mtp.0.norm.weight", &[1], &[1.0]),
    ]);
    let mut reports = Vec::new();
    let mut loader =
        Loader::new(&checkpoint).with_progress(|read, total| reports.push((read, total)));
    loader.skip_prefix("mtp.");
    let norm = loader.dense("norm", &[2]);
    let again = loader.dense("norm", &[2]);
    let linear = loader.linear("w", 2, 3);
    let ids = loader.ids("ids", &[1], 1);
    let all = || Some((norm?, again?, linear?, ids?));
    let all = all();
    loader.finish(all).unwrap();
    assert_eq!(reports, [(8, 23), (14, 23), (15, 23), (23, 23)]);
}
