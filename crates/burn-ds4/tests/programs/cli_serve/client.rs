//! A server as a process, and requests to it over plain connections.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::net::TcpStream;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use serde_json::{Value, json};

use crate::cli::program;
#[cfg(unix)]
use crate::cli::signal;
use crate::golden::root;

/// How long a response may take before a test gives up: far longer than any does, whatever else the
/// machine has to do.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// A running server, which is stopped when this is dropped.
pub(crate) struct Server {
    child: Child,
    address: String,
    log: File,
}

impl Server {
    /// Starts the server with the shipped checkpoint, unless the arguments say otherwise, on the
    /// CPU, which the expected texts are of.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::start_with_key(arguments, "")
    }

    /// The same with a key in the environment.
    pub(crate) fn start_with_key(arguments: &[&str], key: &str) -> Self {
        let mut log = tempfile::tempfile().expect("a temporary file");
        let stderr = log.try_clone().expect("a second handle");
        let mut child = program("serve")
            .args(["--port", "0", "--device", "flex"])
            .args(arguments)
            .env("DS4_API_KEY", key)
            .current_dir(root())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .expect("the program starts");
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().expect("it is piped"));
        stdout.read_line(&mut line).expect("text");
        let address = line.trim().strip_prefix("listening on http://");
        let address = address.map(str::to_owned).unwrap_or_else(|| {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{arguments:?}: {line:?} {}", read_all(&mut log))
        });
        Self {
            child,
            address,
            log,
        }
    }

    /// The server that tests share which run at the same time.
    pub(crate) fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let server = Arc::new(Self::start(&["--draft-tokens", "1"]));
            *shared = Arc::downgrade(&server);
            server
        })
    }

    /// Sends a request whose response nobody has to read.
    pub(crate) fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).expect("a connection");
        // A request that is too long may be answered, and the connection closed, before its end.
        let _ = stream.write_all(body);
        stream
    }

    /// Sends a request, and returns as soon as there is a response.
    pub(crate) fn open(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Response {
        Response::read(self.send(method, path, headers, body))
    }

    pub(crate) fn get(&self, path: &str) -> Response {
        self.open("GET", path, &[], b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.open("POST", path, &[], body.to_string().as_bytes())
    }

    /// The answer to a request that is right.
    #[track_caller]
    pub(crate) fn ask(&self, path: &str, body: &Value) -> Value {
        let mut response = self.post(path, body);
        let answer = response.json();
        assert_eq!(response.status, 200, "{body}: {answer}");
        answer
    }

    /// What a stream of that answer says.
    #[track_caller]
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let mut response = self.post(path, &body);
        assert_eq!(response.status, 200, "{body}");
        let mut events = response.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{body}");
        let events = events.iter().map(|event| serde_json::from_str(event));
        events.collect::<Result<_, _>>().expect("JSON")
    }

    /// A figure of `/metrics`, 0 if there is none yet.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let mut lines = text.lines().filter_map(|line| line.rsplit_once(' '));
        let value = lines.find(|(found, _)| *found == name);
        value.map_or(0.0, |(_, value)| value.parse().expect("a number"))
    }

    /// Waits until a figure has a value.
    #[track_caller]
    pub(crate) fn await_metric(&self, name: &str, expected: f64) {
        for _ in 0..PATIENCE.as_millis() / 20 {
            if self.metric(name) == expected {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{name} is {}, not {expected}", self.metric(name));
    }

    /// Bytes of memory that the process has, where the system tells.
    pub(crate) fn memory(&self) -> Option<u64> {
        resident(&self.child.id().to_string())
    }

    /// Asks the server to stop, by `TERM` or `INT`.
    #[cfg(unix)]
    pub(crate) fn signal(&self, name: &str) {
        signal(&self.child, name);
    }

    /// Waits until the server has ended by itself.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("a child")
    }

    /// What the server has logged.
    pub(crate) fn log(&mut self) -> String {
        read_all(&mut self.log)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_all(file: &mut File) -> String {
    let mut text = String::new();
    file.rewind().expect("a file");
    file.read_to_string(&mut text).expect("text");
    text
}

/// A response, whose body is read when it is asked for.
pub(crate) struct Response {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    stream: BufReader<TcpStream>,
}

impl Response {
    fn read(stream: TcpStream) -> Self {
        let mut stream = BufReader::new(stream);
        let mut line = || {
            let mut line = String::new();
            stream.read_line(&mut line).expect("a response");
            line.trim_end().to_owned()
        };
        let status = line();
        let status = status.split(' ').nth(1).and_then(|code| code.parse().ok());
        let mut headers = Vec::new();
        while let Some((name, value)) = line().split_once(": ") {
            headers.push((name.to_lowercase(), value.to_owned()));
        }
        Self {
            status: status.expect("a status line"),
            headers,
            stream,
        }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(found, _)| found == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The next chunk of a body without a length; empty at its end.
    pub(crate) fn chunk(&mut self) -> Vec<u8> {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("a chunk's size");
        let size = usize::from_str_radix(line.trim_end(), 16).expect("a size");
        let mut chunk = vec![0; size + 2];
        self.stream.read_exact(&mut chunk).expect("a chunk");
        chunk.truncate(size);
        chunk
    }

    pub(crate) fn bytes(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        if self.header("transfer-encoding") == Some("chunked") {
            loop {
                match self.chunk() {
                    chunk if chunk.is_empty() => break,
                    chunk => body.extend(chunk),
                }
            }
        } else {
            self.stream.read_to_end(&mut body).expect("a body");
        }
        body
    }

    pub(crate) fn text(&mut self) -> String {
        String::from_utf8(self.bytes()).expect("UTF-8")
    }

    #[track_caller]
    pub(crate) fn json(&mut self) -> Value {
        let text = self.text();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"))
    }

    /// The data of all events that are still to come.
    pub(crate) fn events(&mut self) -> Vec<String> {
        let text = self.text();
        let events = text
            .split("\n\n")
            .filter_map(|event| event.lines().find_map(|line| line.strip_prefix("data: ")));
        events.map(str::to_owned).collect()
    }
}

/// Bytes of memory that a process has, where the system tells.
fn resident(process: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes << 10)
}
