//! `fair` of scheme `police`, as it is written, changed and shown.

use crate::{
    common::Place,
    edt::{Bed, ok, refused},
    need_root,
};

#[test]
fn root_police_fair_is_written_in_a_file() {
    need_root!();
    let (place, bed) = (Place::new(), Bed::new());
    let text = "[[limit]]\nname = \"up\"\nscope = { dev = \"eth0\" }\nscheme = \"police\"\n\
                egress = \"20mbit\"\nfair = true\n";
    let file = place.file("limits.toml", text);
    let done = ok(&place, &bed, &format!("apply {}", file.display()));
    assert!(done.contains("scheme police, fair"), "{done}");
    let again = ok(&place, &bed, &format!("apply {}", file.display()));
    assert!(again.contains("Nothing to do"), "{again}");
    let status: serde_json::Value =
        serde_json::from_str(&ok(&place, &bed, "status --json")).unwrap();
    assert_eq!(status["limits"][0]["police"]["fair"], true, "{status}");
    let message = refused(&place, &bed, "limit set up --meter srtcm");
    assert!(message.contains("--meter: a limit with a meter has no equal parts"), "{message}");
    let changed = ok(&place, &bed, "limit set up --fair=false");
    assert!(changed.contains("fair true -> false"), "{changed}");
    ok(&place, &bed, "detach");
    let message = refused(&place, &bed, "run --egress 20mbit --fair -- true");
    assert!(message.contains("--fair: only scheme `police` has `fair`"), "{message}");
}
