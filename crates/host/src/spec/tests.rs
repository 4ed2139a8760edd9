use insta::{allow_duplicates, assert_snapshot};
use proptest::prelude::*;
use tidegate_core::police::Hook;

use super::*;
use crate::settings;

pub(super) const GOOD: &str = r#"
[[limit]]
name    = "backup"
scope   = { cgroup = "system.slice/backup.service" }
egress  = "200mbit"
ingress = "500mbit"
burst   = "1ms"

[[limit]]
name    = "web"
scope   = { cgroup = "/system.slice/web.service" }
scheme  = "nrm"
egress  = "1gbit"
mark    = "0.25ms"
drop    = "150kb"
loopback = true
pace_ceiling = false
rto_min = "0ms"
delack_max = "10ms"
"#;

fn refusal(text: &str) -> String {
    Spec::parse("limits.toml", text).unwrap_err().to_string()
}

/// A limit with `line` added to, or instead of, what a good one has.
fn with(line: &str) -> String {
    let field = line.split(' ').next().unwrap();
    let lines = ["name = \"backup\"", "scope = { cgroup = \"a/b\" }", "egress = \"50mbit\""];
    let kept = lines.iter().filter(|l| l.split(' ').next() != Some(field));
    let kept = kept.copied().collect::<Vec<_>>().join("\n");
    refusal(&format!("[[limit]]\n{kept}\n{line}\n"))
}

#[test]
fn a_spec_reads() {
    let spec = Spec::parse("limits.toml", GOOD).unwrap();
    assert_eq!(spec.limits.len(), 2);
    let [backup, web] = &spec.limits[..] else { unreachable!() };
    assert_eq!((backup.name.as_str(), backup.line), ("backup", 2));
    assert_eq!(backup.options.egress.unwrap().rate.to_string(), "200mbit");
    assert_eq!(backup.options.ingress.unwrap().burst, "1ms".parse().ok());
    assert!(backup.options.pace_ceiling && !backup.options.loopback);
    assert_eq!((web.scope.name(), web.line), ("/system.slice/web.service", 9));
    assert!(web.options.ingress.is_none() && web.options.loopback && !web.options.pace_ceiling);
    assert_eq!(web.options.rto_min.0, 0);
    for (text, blank) in [("", true), ("# none yet\n", true), ("limit = []", false)] {
        let spec = Spec::parse("x", text).unwrap();
        assert_eq!((spec.limits, spec.blank), (Vec::new(), blank));
    }
}

#[test]
fn rates_that_are_none() {
    assert_snapshot!(with("egress = \"50mbps\""), @"limits.toml:4: limit `backup`: egress: `50mbps`: `mbps` means megabytes per second to tc and megabits per second to most people; write `50mbit` for megabits, or `400mbit` for megabytes");
    assert_snapshot!(with("egress = \"50\""), @"limits.toml:4: limit `backup`: egress: `50` has no unit; write for example `50mbit` (one of bit, kbit, mbit, gbit, tbit)");
    assert_snapshot!(with("egress = \"50mb\""), @"limits.toml:4: limit `backup`: egress: `50mb`: unknown unit `mb`; use one of bit, kbit, mbit, gbit, tbit");
    assert_snapshot!(with("egress = 50"), @"limits.toml:4: limit `backup`: egress: expected a text in quotes, found the bare number 50; write for example `egress = \"50mbit\"`");
    assert_snapshot!(with("egress = \"0mbit\""), @"limits.toml:4: limit `backup`: egress: `0mbit` is zero; write for example `50mbit`");
    assert_snapshot!(with("egress = \"-1mbit\""), @"limits.toml:4: limit `backup`: egress: `-1mbit` is negative; write for example `50mbit`");
    assert_snapshot!(with("egress = \"\""), @"limits.toml:4: limit `backup`: egress: empty rate; write for example `50mbit`");
    assert_snapshot!(with("egress = \"999tbit\""), @"limits.toml:4: limit `backup`: egress: 999tbit is out of range; a limit is between 8kbit and 100gbit");
    assert_snapshot!(with("ingress = \"1bit\""), @"limits.toml:5: limit `backup`: ingress: 1bit is out of range; a limit is between 8kbit and 100gbit");
    assert_snapshot!(with("egress = \"99999999999999999999999999mbit\""), @"limits.toml:4: limit `backup`: egress: `99999999999999999999999999mbit` is too large");
    assert_snapshot!(with("egress = \"none\""), @"limits.toml:4: limit `backup`: egress: neither egress nor ingress has a rate; give one of them, for example 50mbit");
}

#[test]
fn thresholds_and_flags_that_are_none() {
    assert_snapshot!(with("burst = \"1\""), @"limits.toml:5: limit `backup`: burst: `1` has no unit; write for example `1ms` (one of ns, us, ms, s, b, kb, mb, gb)");
    assert_snapshot!(with("burst = \"1h\""), @"limits.toml:5: limit `backup`: burst: `1h`: unknown unit `h`; use one of ns, us, ms, s, b, kb, mb, gb");
    assert_snapshot!(with("burst = \"600s\""), @"limits.toml:5: limit `backup`: burst: burst of 600s is longer than 512s at 50mbit; make it shorter");
    assert_snapshot!(with("mark = \"9ms\""), @"limits.toml:5: limit `backup`: mark: mark threshold 9ms must be below drop threshold 7751.68us");
    assert_snapshot!(with("rto_min = \"5s\""), @"limits.toml:5: limit `backup`: rto_min: 5s is out of range; write 1ms to 200ms, or 0ms for the kernel's own");
    assert_snapshot!(with("loopback = \"yes\""), @"limits.toml:5: limit `backup`: loopback: expected `true` or `false` without quotes, found the text \"yes\"; write for example `loopback = true`");
    assert_snapshot!(with("scheme = \"htb\""), @r#"limits.toml:5: limit `backup`: scheme: scheme `htb` works on devices, ports, and cgroups inside their limits; on another cgroup write scheme = "pace", "nrm", "edt" or "police""#);
    let unknown = with("scheme = \"fast\"");
    assert!(
        unknown.starts_with(
            "limits.toml:5: limit `backup`: scheme: unknown scheme `fast`; use `pace`, "
        ),
        "{unknown}"
    );
}

#[test]
fn fields_that_are_none() {
    assert_snapshot!(with("egres = \"50mbit\""), @"limits.toml:5: limit `backup`: unknown field `egres`; did you mean `egress`?");
    assert_snapshot!(with("rto-min = \"5ms\""), @"limits.toml:5: limit `backup`: unknown field `rto-min`; did you mean `rto_min`?");
    assert_snapshot!(with("rate = \"50mbit\""), @"limits.toml:5: limit `backup`: unknown field `rate`; write `egress`, `ingress` or both");
    assert_snapshot!(with("priority = 3"), @"limits.toml:5: limit `backup`: unknown field `priority`; a limit has name, scope, parent, each, required, move, schedule, egress, ingress, guarantee, ceiling, weight, scheme, burst, mark, ecn, drop, meter, actions, fair, hook, match, exempt, loopback, pace_ceiling, rto_min, delack_max");
    assert_snapshot!(refusal("[[limit]]\nscope = { cgroup = \"a\" }\negress = \"1mbit\""), @"limits.toml:1: name: missing; write for example `name = \"backup\"`");
    assert_snapshot!(refusal("[[limit]]\nname = \"a\"\negress = \"1mbit\""), @"limits.toml:1: limit `a`: scope: missing; write for example `scope = { cgroup = \"system.slice/backup.service\" }`");
    assert_snapshot!(refusal("[[limit]]\nname = \"a\"\nscope = { cgroup = \"a\" }\n"), @"limits.toml:1: limit `a`: egress: neither egress nor ingress has a rate; give one of them, for example 50mbit");
}

#[test]
fn names_and_scopes_that_are_none() {
    assert_snapshot!(with("name = \"a b\""), @"limits.toml:4: limit `a b`: name: limit name `a b` must be 1 to 63 letters, digits, `-` or `_`, and start with a letter or digit");
    assert_snapshot!(with("name = 7"), @"limits.toml:4: name: expected a text in quotes, found the bare number 7; write for example `name = \"backup\"`");
    assert_snapshot!(with("scope = \"a/b\""), @"limits.toml:4: limit `backup`: scope: expected a table, found the text \"a/b\"; write for example `scope = { cgroup = \"system.slice/backup.service\" }`");
    assert_snapshot!(with("scope = {}"), @"limits.toml:4: limit `backup`: scope: missing; write for example `scope = { cgroup = \"system.slice/backup.service\" }`");
    assert_snapshot!(with("scope = { cgroup = \"\" }"), @"limits.toml:4: limit `backup`: scope: empty path; write for example `system.slice/backup.service`, or `/` for the whole host");
    assert_snapshot!(with("scope = { cgroup = \"../a\" }"), @"limits.toml:4: limit `backup`: scope: `../a` is no cgroup path; write it relative to the cgroup mount, without `.` and `..`");
    assert_snapshot!(with("scope = { port = \"tap0\", dev = \"eth0\" }"), @"limits.toml:4: limit `backup`: scope: more than one scope; write one of cgroup, unit, slice, user, container, pod, exe, dev and port");
    assert_snapshot!(with("scope = { dev = \"a b\" }"), @"limits.toml:4: limit `backup`: scope: `a b` is no device name; write it as `ip link` shows it, for example `eth0`");
    assert_snapshot!(with("scope = { port = \"tap0\" }\nscheme = \"pace\""), @r#"limits.toml:5: limit `backup`: scheme: scheme `pace` works on cgroups; on a port write scheme = "edt", "police", "htb", "dem" or "spring""#);
    assert_snapshot!(with("scope = { dev = \"eth0\" }\nscheme = \"pace\""), @r#"limits.toml:5: limit `backup`: scheme: scheme `pace` works on cgroups; on a device write scheme = "edt", "police", "htb", "dem", "spring" or "tbf""#);
    assert_snapshot!(with("scope = { unit = \"a\" }"), @"limits.toml:4: limit `backup`: scope: `a` has no ending; write `a.service`, or another kind such as `a.scope`");
}

#[test]
fn pods_are_selected_by_any_of_four_keys() {
    let table = [
        ("namespace = \"prod\"", "prod"),
        ("name = \"api-*\"", "*/api-*"),
        ("labels = \"app=api, tier\"", "*/*/app=api, tier"),
        ("labels = \"a.b/c=d\", namespace = \"prod\"", "prod/*/a.b/c=d"),
        ("join = true", "*/*/tidegate.dev/limit=shared"),
        ("join = true, namespace = \"prod\", labels = \"a\"", "prod/*/tidegate.dev/limit=shared,a"),
    ];
    for (pod, selector) in table {
        let text = format!(
            "annotations = true\n[[limit]]\nname = \"shared\"\nscope = {{ pod = {{ {pod} }} }}\n\
             egress = \"1mbit\"\neach = true"
        );
        let spec = Spec::parse("limits.toml", &text).unwrap();
        assert!(spec.annotations);
        assert_eq!(spec.limits[0].scope, Scope::named("pod", selector).unwrap(), "{pod}");
    }
}

#[test]
fn selectors_that_select_nothing() {
    assert_snapshot!(with("scope = { slice = \"a\" }"), @"limits.toml:4: limit `backup`: scope: `a` is no slice; the name of one ends in `.slice`");
    assert_snapshot!(with("scope = { user = \"a b\" }"), @"limits.toml:4: limit `backup`: scope: `a b` is no name; leave `/` and spaces out");
    assert_snapshot!(with("scope = { dev = 5 }"), @r#"limits.toml:4: limit `backup`: scope: expected a text in quotes, found the bare number 5; write for example `scope = { dev = "eth0" }`"#);
    assert_snapshot!(with("scope = { container = { labels = true } }"), @r#"limits.toml:4: limit `backup`: scope: expected a text in quotes, found `true`; write for example `scope = { container = { labels = "app=web" } }`"#);
    assert_snapshot!(with("labels = true"), @"limits.toml:5: limit `backup`: unknown field `labels`; it belongs at the top of the file, above the first `[[limit]]`");
    assert_snapshot!(refusal("labels = \"yes\""), @r#"limits.toml:1: labels: expected `true` or `false` without quotes, found the text "yes"; write for example `labels = true`"#);
    let each = "[[limit]]\nname = \"a\"\nscope = { unit = \"*.service\" }\neach = true\negress = \"1mbit\"\n";
    let inside =
        each.replace("each = true", "parent = \"a\"").replace("\"a\"\nscope", "\"b\"\nscope");
    assert_snapshot!(refusal(&format!("{each}{inside}")), @"limits.toml:4: limit `a`: each: it makes a limit for each match, and no other limit can be inside those; leave `each` out");
    let number = Spec::parse("x", &each.replace("unit = \"*.service\"", "user = 1000")).unwrap();
    assert_eq!(number.limits[0].scope.to_string(), "user `1000`");
    assert_snapshot!(with("scope = { exe = \"rsync\" }"), @"limits.toml:4: limit `backup`: scope: `rsync` is no path of a program; write it from `/` on, without spaces");
    assert_snapshot!(with("scope = { args = \"-a\", exe = \"/bin/x\" }"), @"limits.toml:4: limit `backup`: scope: write `exe` before `args`");
    assert_snapshot!(with("scope = { container = { label = \"a\" } }"), @r#"limits.toml:4: limit `backup`: scope: unknown field `label`; write `labels = "app=web"`"#);
    assert_snapshot!(with("scope = { container = { labels = \"a,,b\" } }"), @"limits.toml:4: limit `backup`: scope: `a,,b` is no label; write `KEY=VALUE` or `KEY`, with commas between several");
    assert_snapshot!(with("scope = { task = \"a\" }"), @"limits.toml:4: limit `backup`: scope: unknown field `task`; a scope has one of cgroup, unit, slice, user, container, pod, exe, dev and port");
    for none in ["\"a\"", "{}", "{ join = false }"] {
        let pod = with(&format!("scope = {{ pod = {none} }}"));
        allow_duplicates! {
            assert_snapshot!(pod, @r#"limits.toml:4: limit `backup`: scope: write for example `scope = { pod = { namespace = "prod", labels = "app=api" } }`"#);
        }
    }
    assert_snapshot!(with("scope = { pod = { label = \"a\" } }"), @"limits.toml:4: limit `backup`: scope: unknown field `label`; a pod has namespace, name, labels and join");
    assert_snapshot!(with("scope = { pod = { namespace = \"a/b\" } }"), @"limits.toml:4: limit `backup`: scope: `a/b` is no name; leave `/` and spaces out");
    assert_snapshot!(with("scope = { pod = { labels = \"\" } }"), @"limits.toml:4: limit `backup`: scope: `` is no label; write `KEY=VALUE` or `KEY`, with commas between several");
    assert_snapshot!(with("each = true"), @r#"limits.toml:5: limit `backup`: each: only with a scope that may match several things, such as `unit = "job-*.service"`"#);
    assert_snapshot!(with("move = true"), @"limits.toml:5: limit `backup`: move: only with `exe` in the scope");
    assert_snapshot!(with("required = 1"), @"limits.toml:5: limit `backup`: required: expected `true` or `false` without quotes, found the bare number 1; write for example `required = true`");
}

#[test]
fn schedules_that_are_none() {
    let row = |row: &str| with(&format!("schedule = [{row}]"));
    assert_snapshot!(row("{ days = \"monday\", egress = \"1mbit\" }"), @"limits.toml:5: limit `backup`: schedule: `monday` names no days; write for example `mon-fri` or `sat,sun`");
    assert_snapshot!(row("{ from = \"8\", egress = \"1mbit\" }"), @"limits.toml:5: limit `backup`: schedule: `8` is no time of the day; write for example `08:00`, and `24:00` for the end");
    assert_snapshot!(row("{ days = \"mon\" }"), @"limits.toml:5: limit `backup`: schedule: a row has no rate; give it `egress`, `ingress` or both");
    assert_snapshot!(row("{ rate = \"1mbit\" }"), @"limits.toml:5: limit `backup`: schedule: unknown field `rate`; a row has days, from, to, egress and ingress");
    assert_snapshot!(row("{ egress = \"1bit\" }"), @"limits.toml:1: limit `backup`: egress: 1bit is out of range; a limit is between 8kbit and 100gbit");
}

#[test]
fn a_schedule_gives_a_limit_its_rates_and_may_give_it_none() {
    let text = "[[limit]]\nname = \"a\"\nscope = { unit = \"a.service\" }\nschedule = [{ from = \
                \"08:00\", to = \"18:00\", egress = \"10mbit\" }]\n[[limit]]\nname = \"b\"\nscope = \
                { user = \"b\" }\nscheme = \"nrm\"\ningress = \"5mbit\"\nschedule = [{ days = \"sun\", ingress = \"none\" }]";
    let spec = Spec::parse("limits.toml", text).unwrap();
    let at = |when: &str| {
        let moment = spec.at(&when.parse().unwrap()).unwrap();
        let rate = |limit: &LimitSpec| {
            let queue = limit.options.egress.or(limit.options.ingress).unwrap();
            format!("{} {}", limit.name, queue.rate)
        };
        let mut said: Vec<_> = moment.spec.limits.iter().map(rate).collect();
        said.extend(moment.off.iter().map(|limit| format!("{} off", limit.name)));
        for (name, scheduled) in &moment.scheduled {
            let (when, rates) = scheduled.change.as_ref().unwrap();
            said.push(format!("{name} from {} on {rates}", when.strftime("%a %H:%M")));
        }
        let next = moment.next.unwrap().to_string();
        format!("{}; until {next}", said.join(", "))
    };
    assert_snapshot!(at("2026-03-02T07:00+00:00[UTC]"), @"b 5mbit, a off, a from Mon 08:00 on egress 10mbit, b from Sun 00:00 on off; until 2026-03-02T08:00:00Z");
    assert_snapshot!(at("2026-03-02T08:00+00:00[UTC]"), @"a 10mbit, b 5mbit, a from Mon 18:00 on off, b from Sun 00:00 on off; until 2026-03-02T18:00:00Z");
    assert_snapshot!(at("2026-03-08T19:00+00:00[UTC]"), @"a off, b off, a from Mon 08:00 on egress 10mbit, b from Mon 00:00 on ingress 5mbit; until 2026-03-09T00:00:00Z");
}

#[test]
fn two_limits_in_one_place() {
    let two = |name: &str, cgroup: &str| {
        refusal(&format!(
            "[[limit]]\nname = \"a\"\nscope = {{ cgroup = \"x/y\" }}\negress = \"1mbit\"\n\n\
             [[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"{cgroup}\" }}\negress = \"1mbit\"\n"
        ))
    };
    assert_snapshot!(two("a", "z"), @"limits.toml:7: limit `a`: name: a limit of this name is on line 1 already; give each its own name");
    assert_snapshot!(two("b", "/x//y/"), @"limits.toml:8: limit `b`: scope: limit `a` on line 1 has this cgroup already; put both directions in one limit, write one as the parent of the other, or limit a cgroup above or below it");
}

#[test]
fn limits_on_one_cgroup_are_inside_each_other() {
    let limit = |name: &str, more: &str| {
        format!("[[limit]]\nname = \"{name}\"\nscope = {{ cgroup = \"x\" }}\n{more}\n")
    };
    let [a, b, c] = [("a", "b"), ("b", "c"), ("c", "")].map(|(name, parent)| match parent {
        "" => limit(name, "egress = \"1mbit\""),
        parent => limit(name, &format!("parent = \"{parent}\"")),
    });
    let parse = |text: &str| Spec::parse("limits.toml", text).map(|spec| spec.limits.len());
    assert_eq!(parse(&(a.clone() + &b + &c)).unwrap(), 3);
    // The host may have the one between.
    assert_eq!(parse(&(a + &c)).unwrap(), 2);
    let sibling = limit("d", "parent = \"c\"");
    let refused = parse(&(sibling + &b + &c)).unwrap_err().to_string();
    assert!(refused.contains("`b`: scope: limit `d` on line 1 has this cgroup"), "{refused}");
}

#[test]
fn files_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let read = |path: &Path| {
        let message = Spec::read(path).unwrap_err().to_string();
        message.replace(&dir.path().display().to_string(), "DIR")
    };
    assert_snapshot!(read(dir.path()), @"DIR: is a directory; name a file such as limits.toml");
    assert_snapshot!(read(&dir.path().join("no.toml")), @"DIR/no.toml: cannot be read: No such file or directory (os error 2)");
    let binary = dir.path().join("binary");
    std::fs::write(&binary, [0xff, 0xfe]).unwrap();
    assert_snapshot!(read(&binary), @"DIR/binary: is not UTF-8 text; is it a spec?");
    assert_snapshot!(read(Path::new("/dev/zero")), @"/dev/zero: is larger than 4 MiB; is it a spec?");
    let regular = |path: &Path| Spec::read_regular(path).unwrap_err().to_string();
    assert_snapshot!(regular(Path::new("/dev/zero")), @"/dev/zero: cannot be read: it is not a regular file");
    assert!(regular(dir.path()).ends_with(": is a directory; name a file such as limits.toml"));
    assert_snapshot!(refusal("[limit]\nname = \"a\"\n"), @"limits.toml:1: limit: expected double brackets, found a table; write for example `[[limit]]`");
    assert_snapshot!(refusal("[[group]]\nname = \"a\"\n"), @r#"limits.toml:1: rate: missing; write for example `rate = "10gbit"`"#);
    assert_snapshot!(refusal("\n[[limits]]\n"), @"limits.toml:2: unknown field `limits`; did you mean `[[limit]]`?");
    assert_snapshot!(refusal("name = \"a\"\n"), @"limits.toml:1: unknown field `name`; it belongs into a limit: write `[[limit]]` on a line above it");
    assert_snapshot!(refusal("[[limit]]\nname = backup\n"), @"limits.toml:2: not TOML: string values must be quoted, expected literal string, in `name = backup`");
    assert_snapshot!(refusal("[[limit]]\nname = \"a\"\nname = \"b\"\n"), @"limits.toml:3: not TOML: duplicate key, in `name = \"b\"`");
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC*") {
        let _ = Spec::parse("limits.toml", &text);
    }

    #[test]
    fn no_value_panics(at in 0..fields::FIELDS.len(), value in "[ -~]{0,12}") {
        let name = fields::FIELDS[at].key.name;
        let _ = Spec::parse("x", &format!("[[limit]]\n{name} = {value}\n"));
        let _ = Spec::parse("x", &format!("[[limit]]\n{name} = '{value}'\n"));
    }
}

#[test]
fn devices_take_departure_times_of_what_leaves() {
    let spec = |more: &str| {
        format!("[[limit]]\nname = \"a\"\nscope = {{ dev = \"eth0\" }}\nscheme = \"edt\"\n{more}\n")
    };
    let parsed = Spec::parse("limits.toml", &spec("egress = \"1gbit\"")).unwrap();
    assert_eq!(parsed.limits[0].scope, Scope::Dev("eth0".to_owned()));
    assert_snapshot!(refusal(&spec("ingress = \"1mbit\"")), @r#"limits.toml:5: limit `a`: ingress: on a device, scheme `edt` limits egress only; write ingress = "none", or scheme = "police", "htb", "dem" or "spring""#);
    assert_snapshot!(refusal(&spec("egress = \"1mbit\"\nloopback = true")), @"limits.toml:6: limit `a`: loopback: a limit on a device has no loopback traffic; leave this out");
    assert_snapshot!(refusal(&spec("egress = \"1mbit\"\nrto_min = \"20ms\"")), @r#"limits.toml:6: limit `a`: rto_min: scheme `edt` has no `rto_min`; it has egress, burst, mark, drop, exempt, loopback; leave this out, or write scheme = "pace" or "nrm""#);
}

#[test]
fn a_scheme_is_refused_where_it_does_not_work() {
    let all = ["pace", "nrm", "edt", "police", "htb", "dem", "spring", "carousel", "tbf"];
    // With egress, with ingress, with both.
    let works = [
        ("cgroup = \"a\"", ["pace nrm edt police", "pace nrm police", "pace nrm police"]),
        ("cgroup = \"a/*\"", ["pace nrm edt police", "pace nrm police", "pace nrm police"]),
        ("unit = \"a.service\"", ["pace nrm edt police", "pace nrm police", "pace nrm police"]),
        (
            "dev = \"eth0\"",
            ["edt police htb dem spring tbf", "police htb dem spring", "police htb dem spring"],
        ),
        (
            "port = \"tap0\"",
            ["edt police htb dem spring", "police htb dem spring tbf", "police htb dem spring"],
        ),
    ];
    let rates = [(1, 0), (0, 1), (1, 1)];
    for (scope, works) in works {
        for ((egress, ingress), works) in rates.into_iter().zip(works) {
            let works: Vec<_> = works.split(' ').collect();
            for scheme in all {
                let rate = |is: i32| if is == 1 { "1mbit" } else { "none" };
                let (out, back) = (rate(egress), rate(ingress));
                let text = format!(
                    "[[limit]]\nname = \"a\"\nscope = {{ {scope} }}\nscheme = \"{scheme}\"\negress = \
                     \"{out}\"\ningress = \"{back}\"\n"
                );
                let is_read = Spec::parse("limits.toml", &text);
                assert_eq!(is_read.is_ok(), works.contains(&scheme), "{text}{is_read:?}");
                // An error names the schemes that do.
                let Err(error) = is_read.map_err(|e| e.to_string()) else { continue };
                let names = works.iter().all(|name| error.contains(&format!("\"{name}\"")));
                assert!(names || error.contains("no `[[nic]]`"), "{error}");
            }
        }
    }
    let spec = |more: &str| format!("[[limit]]\nname = \"a\"\nscheme = \"tbf\"\n{more}\n");
    assert_snapshot!(refusal(&spec("scope = { cgroup = \"x\" }\negress = \"1mbit\"")), @r#"limits.toml:3: limit `a`: scheme: scheme `tbf` works on devices, ports; on a cgroup write scheme = "pace", "nrm", "edt" or "police""#);
    assert_snapshot!(refusal(&spec("scope = { dev = \"x\" }\ningress = \"1mbit\"")), @r#"limits.toml:5: limit `a`: ingress: on a device, scheme `tbf` limits egress only; write ingress = "none", or scheme = "police", "htb", "dem" or "spring""#);
    assert_snapshot!(refusal(&spec("scope = { port = \"x\" }\negress = \"1mbit\"\ningress = \"1mbit\"")), @r#"limits.toml:5: limit `a`: egress: on a port, scheme `tbf` limits ingress only; write egress = "none", or scheme = "police", "htb", "dem" or "spring""#);
}

/// A root with both directions, and a limit in it with `more`.
fn inside(more: &str) -> String {
    format!(
        "[[limit]]\nname = \"b\"\nscope = {{ cgroup = \"x/y\" }}\nparent = \"a\"\n{more}\n[[limit]]\nname = \
         \"a\"\nscope = {{ cgroup = \"x\" }}\negress = \"1gbit\"\ningress = \"2gbit\"\n"
    )
}

#[test]
fn limits_inside_limits_read() {
    let read = |more: &str| Spec::parse("limits.toml", &inside(more)).unwrap().limits[0].clone();
    let rate = |queue: Option<tidegate_core::queue_options::VirtualQueueOptions>| {
        queue.unwrap().rate.to_string()
    };
    let plain = read("");
    assert_eq!(plain.parent.as_deref(), Some("a"));
    let chosen = plain.options.chosen;
    let free = LimitOptions { chosen, ..settings::inside_another() };
    assert_eq!(settings::differences(&plain.options, &free), []);
    let all = read("guarantee = \"100mbit\"\nceiling = \"500mbit\"\nweight = 50\n");
    let class = all.options.class.unwrap();
    assert_eq!((class.guarantee.unwrap().to_string(), class.weight), ("100mbit".into(), 50));
    assert_eq!(
        (rate(all.options.egress), rate(all.options.ingress)),
        ("500mbit".into(), "500mbit".into())
    );
    let one = read("ingress = \"5mbit\"");
    assert!(settings::is_parents(&one.options, one.options.egress.unwrap().rate));
    assert_eq!(rate(one.options.ingress), "5mbit");
    assert!(one.asked.ingress && !one.asked.egress);
}

#[test]
fn limits_inside_limits_that_are_none() {
    let above = "[[limit]]\nname = \"x\"\nscope = { cgroup = \"/a\" }\nparent = \"y\"\n\
                 [[limit]]\nname = \"y\"\nscope = { cgroup = \"a/b\" }\negress = \"1mbit\"\n";
    assert_snapshot!(refusal(above), @"limits.toml:4: limit `x`: parent: `y` is on cgroup `a/b`, which does not contain cgroup `a`; the parent of a limit is on the same cgroup or on one above");
    let refusal = |more: &str| refusal(&inside(more));
    assert_snapshot!(refusal("weight = 0"), @"limits.toml:5: limit `b`: weight: 0 is out of range; write 1 to 10000, where 100 is the weight of most");
    assert_snapshot!(refusal("weight = 10001"), @"limits.toml:5: limit `b`: weight: 10001 is out of range; write 1 to 10000, where 100 is the weight of most");
    assert_snapshot!(refusal("weight = 99999999999999999999"), @"limits.toml:5: limit `b`: weight: 9223372036854775807 is out of range; write 1 to 10000, where 100 is the weight of most");
    assert_snapshot!(refusal("weight = 1.5"), @"limits.toml:5: limit `b`: weight: expected a whole number without quotes, found the bare number 1.5; write for example `weight = 100`");
    assert_snapshot!(refusal("weight = \"50\""), @"limits.toml:5: limit `b`: weight: expected a whole number without quotes, found the text \"50\"; write for example `weight = 100`");
    assert_snapshot!(refusal("guarantee = 5"), @"limits.toml:5: limit `b`: guarantee: expected a text in quotes, found the bare number 5; write for example `guarantee = \"100mbit\"`");
    assert_snapshot!(refusal("guarantee = \"1bit\""), @"limits.toml:5: limit `b`: guarantee: 1bit is out of range; a limit is between 8kbit and 100gbit");
    assert_snapshot!(refusal("guarantee = \"3gbit\""), @"limits.toml:5: limit `b`: guarantee: the limits inside `a` are guaranteed 3gbit together, and `a` has 1gbit to guarantee (its rate); lower their guarantees, or raise its rate");
    assert_snapshot!(refusal("guarantee = \"10mbit\"\nceiling = \"5mbit\""), @"limits.toml:5: limit `b`: guarantee: the guarantee of 10mbit is above the ceiling of 5mbit; make the one less or the other more");
    assert_snapshot!(refusal("guarantee = \"10mbit\"\negress = \"5mbit\""), @"limits.toml:5: limit `b`: guarantee: the guarantee of 10mbit is above the ceiling of 5mbit; make the one less or the other more");
    assert_snapshot!(refusal("ceiling = \"5mbit\"\negress = \"5mbit\""), @"limits.toml:6: limit `b`: egress: `ceiling` says it for both directions; write either that, or egress and ingress");
    assert_snapshot!(refusal("ceiling = \"1bit\""), @"limits.toml:5: limit `b`: ceiling: 1bit is out of range; a limit is between 8kbit and 100gbit");
    assert_snapshot!(refusal("scheme = \"edt\""), @r#"limits.toml:5: limit `b`: scheme: scheme `edt` neither has a parent nor is one; write scheme = "pace" or "nrm" ("htb" inside a device's limit), or leave the parent out"#);
    assert_snapshot!(refusal("scheme = \"carousel\""), @r#"limits.toml:5: limit `b`: scheme: scheme `carousel` neither has a parent nor is one; write scheme = "pace" or "nrm" ("htb" inside a device's limit), or leave the parent out"#);
    assert_snapshot!(with("weight = 50"), @"limits.toml:5: limit `backup`: weight: only a limit inside another one has this; name its parent, or leave it out");
    assert_snapshot!(with("guarantee = \"5mbit\""), @"limits.toml:5: limit `backup`: guarantee: only a limit inside another one has this; name its parent, or leave it out");
    assert_snapshot!(with("ceiling = \"5mbit\""), @"limits.toml:5: limit `backup`: ceiling: only a limit inside another one has this; write egress or ingress, or name its parent");
    assert_snapshot!(with("ceil = \"5mbit\""), @"limits.toml:5: limit `backup`: unknown field `ceil`; write `ceiling`");
    assert_snapshot!(with("parent = \"backup\""), @"limits.toml:5: limit `backup`: parent: a limit cannot be its own parent; leave this out, or name another limit");
    assert_snapshot!(with("parent = \"a b\""), @"limits.toml:5: limit `backup`: parent: limit name `a b` must be 1 to 63 letters, digits, `-` or `_`, and start with a letter or digit");
    assert_snapshot!(with("scope = { dev = \"eth0\" }\nparent = \"a\""), @"limits.toml:5: limit `backup`: parent: a limit inside another one is on the same cgroup or on one below, or with scheme `htb` on a port or cgroup inside a device's; leave the parent out");
}

#[test]
fn policers_read() {
    let text = r#"
        [[limit]]
        name    = "uplink"
        scope   = { dev = "eth0" }
        scheme  = "police"
        ingress = "50mbit"
        meter   = { type = "srtcm", cbs = "100kb", ebs = "200kb", colour_aware = true }
        actions = { yellow = "dscp af12", red = "drop" }
        hook    = "xdp"

        [[limit]]
        name    = "guest"
        scope   = { port = "tap0" }
        scheme  = "police"
        egress  = "50mbit"
        burst   = "5ms"
        meter   = { type = "trtcm", pir = "80mbit", colours = { yellow = ["cs1"], red = ["le", 2] } }
    "#;
    assert!(Spec::parse("x", text).unwrap_err().to_string().contains("bare number 2"));
    let spec = Spec::parse("x", &text.replace(", 2]", "]")).unwrap();
    let [uplink, guest] = &spec.limits[..] else { unreachable!() };
    let policy = uplink.options.police;
    assert_eq!(policy.meter.unwrap().to_string(), "srtcm,ebs=200kb,colour_aware");
    assert_eq!(policy.actions.map(|action| action.to_string()), ["pass", "dscp af12", "drop"]);
    assert_eq!(uplink.options.ingress.unwrap().burst, "100kb".parse().ok());
    assert_eq!((policy.hook, guest.options.police.hook), (Hook::Xdp, Hook::Auto));
    let colours = guest.options.police.meter.unwrap().colours.unwrap();
    assert_eq!((colours.yellow, colours.red), (1 << 8, 1 << 1));
}

#[test]
fn policers_that_are_none() {
    let police = |line: &str| {
        refusal(&format!(
            "[[limit]]\nname = \"a\"\nscope = {{ dev = \"eth0\" }}\negress = \"50mbit\"\nscheme = \
             \"police\"\n{line}\n"
        ))
    };
    assert_snapshot!(with("scheme = \"pace\"\nmeter = { type = \"srtcm\" }"), @r#"limits.toml:6: limit `backup`: meter: scheme `pace` has no `meter`; it has egress, ingress, ceiling, guarantee, weight, burst, mark, drop, exempt, loopback, rto_min, delack_max; leave this out, or write scheme = "police""#);
    assert_snapshot!(police("meter = { type = \"tbf\" }"), @"limits.toml:6: limit `a`: meter: unknown meter `tbf`; write srtcm, trtcm or rfc4115");
    assert_snapshot!(police("meter = { type = \"srtcm\", pir = \"1mbit\" }"), @"limits.toml:6: limit `a`: meter: srtcm has no `pir`; it has cbs, ebs and colour_aware");
    assert_snapshot!(police("meter = { type = \"trtcm\" }"), @"limits.toml:6: limit `a`: meter: trtcm needs `pir`; write for example pir = \"100mbit\"");
    assert_snapshot!(police("meter = { type = \"trtcm\", pir = \"1mbit\" }"), @"limits.toml:6: limit `a`: meter: peak rate 1mbit is below the committed rate 50mbit; a peak rate covers all traffic");
    assert_snapshot!(police("meter = { type = \"srtcm\", cbs = \"1kb\" }\nburst = \"1kb\""), @"limits.toml:6: limit `a`: meter: `cbs` is the limit's `burst`; write one of them");
    assert_snapshot!(police("meter = { type = \"srtcm\", ebs = 7 }"), @"limits.toml:6: limit `a`: meter: expected a text in quotes, found the bare number 7; write for example `meter = { type = \"srtcm\", ebs = \"200kb\", colour_aware = true }`");
    assert_snapshot!(police("actions = { yellow = \"pass\" }"), @"limits.toml:6: limit `a`: actions: without a meter no packet is yellow; write `meter`, or leave this out");
    assert_snapshot!(police("actions = { blue = \"pass\" }"), @"limits.toml:6: limit `a`: actions: `blue` is no colour; write green, yellow or red");
    assert_snapshot!(police("actions = { red = \"dscp 99\" }"), @"limits.toml:6: limit `a`: actions: `99` is no DSCP; write ef, af11 to af43, cs0 to cs7, va, le, or a number from 0 to 63");
    assert_snapshot!(police("actions = { red = \"mark\" }"), @"limits.toml:6: limit `a`: actions: `mark` is no action; write pass, drop, ce, or for example `dscp af12`");
    assert_snapshot!(police("mark = \"1ms\""), @r#"limits.toml:6: limit `a`: mark: scheme `police` has no `mark`; it has egress, ingress, burst, meter, actions, fair, hook, match, exempt, loopback; leave this out, or write scheme = "pace", "nrm", "edt" or "carousel""#);
    assert_snapshot!(police("hook = \"xdp\""), @"limits.toml:6: limit `a`: hook: XDP polices incoming traffic of a device: write scheme = \"police\", scope = { dev = \"...\" } and `ingress` with it, and no `match`; or leave it out");
    assert_snapshot!(police("hook = \"tc\""), @"limits.toml:6: limit `a`: hook: `tc` is no hook; write auto or xdp");
    assert_snapshot!(police("ingress = \"1mbit\"\nhook = \"xdp\"\nmatch = \"10.0.0.0/8\""), @"limits.toml:7: limit `a`: hook: XDP polices incoming traffic of a device: write scheme = \"police\", scope = { dev = \"...\" } and `ingress` with it, and no `match`; or leave it out");
    assert_snapshot!(with("hook = \"xdp\""), @r#"limits.toml:5: limit `backup`: hook: XDP polices incoming traffic of a device: write scheme = "police", scope = { dev = "..." } and `ingress` with it, and no `match`; or leave it out"#);
    let scope = "scope = { cgroup = \"a\" }\nscheme = \"police\"\nactions = { red = \"dscp cs1\" }";
    assert_snapshot!(with(scope), @"limits.toml:6: limit `backup`: actions: the kernel lets no program on a cgroup change a packet's DSCP; write `pass`, `drop` or `ce`, or put the limit on the device or port by which the packets leave");
}
