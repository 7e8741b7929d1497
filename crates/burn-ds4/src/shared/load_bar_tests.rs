//! The progress bar on a terminal.

use std::io;
use std::sync::{Arc, Mutex};

use indicatif::TermLike;

use super::*;

/// A terminal that keeps what is written to it.
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

fn bar_on_screen(delay: Duration) -> (LoadBar, Screen) {
    let screen = Screen::default();
    let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
    (LoadBar::with_target(delay, target), screen)
}

#[test]
fn the_bar_stays_hidden_until_its_delay_is_over() {
    let (mut bar, screen) = bar_on_screen(Duration::from_secs(3600));
    bar.update(1, 10);
    bar.update(10, 10);
    bar.finish();
    assert_eq!(screen.text(), "");
}

#[test]
fn the_bar_shows_the_bytes_and_is_cleared_at_the_end() {
    let (mut bar, screen) = bar_on_screen(Duration::ZERO);
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

#[test]
fn the_bar_of_a_prompt_shows_its_tokens() {
    let (bar, screen) = bar_on_screen(Duration::ZERO);
    let mut bar = bar.of_prompt();
    std::thread::sleep(Duration::from_millis(2));
    bar.update(512, 1024);
    let text = screen.text();
    assert!(text.contains("Processing the prompt"), "{text}");
    bar.update(1024, 1024);
    let text = screen.text();
    assert!(text.contains("1024/1024 tokens"), "{text}");
}
