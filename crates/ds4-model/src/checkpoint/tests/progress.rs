use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use indicatif::{ProgressDrawTarget, TermLike};

use crate::checkpoint::{LoadBar, LoadProgress, Loader};

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

#[derive(Clone, Debug, Default)]
struct Screen(Arc<Mutex<String>>);

impl Screen {
    fn write(&self, text: &str) -> io::Result<()> {
        self.0.lock().unwrap().push_str(text);
        Ok(())
    }

    fn text(&self) -> String {
        self.0.lock().unwrap().clone()
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        100
    }
    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn write_line(&self, text: &str) -> io::Result<()> {
        self.write(text)
    }
    fn write_str(&self, text: &str) -> io::Result<()> {
        self.write(text)
    }
    fn clear_line(&self) -> io::Result<()> {
        self.write("<clear>")
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

fn bar(delay: Duration) -> (LoadBar, Screen) {
    let screen = Screen::default();
    let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
    (LoadBar::with_target(delay, target), screen)
}

#[test]
fn the_bar_stays_hidden_until_its_delay_is_over() {
    let (mut bar, screen) = bar(Duration::from_secs(3600));
    bar.update(1, 10);
    bar.update(10, 10);
    bar.finish();
    assert_eq!(screen.text(), "");
}

#[test]
fn the_bar_shows_the_bytes_and_is_cleared_at_the_end() {
    let (mut bar, screen) = bar(Duration::ZERO);
    std::thread::sleep(Duration::from_millis(2));
    bar.update(512, 1024);
    bar.update(1024, 1024);
    assert!(
        screen.text().contains("Loading weights"),
        "{}",
        screen.text()
    );
    assert!(screen.text().contains("1.00 KiB"), "{}", screen.text());
    bar.finish();
    assert!(screen.text().ends_with("<clear>"), "{}", screen.text());
}
