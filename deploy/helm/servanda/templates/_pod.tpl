{{- define "servanda.labels" -}}
app.kubernetes.io/name: servanda
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* of every pod */}}
{{- define "servanda.pod" -}}
automountServiceAccountToken: false
# the variables of services would begin as those of the program do
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
volumes:
  - name: contract
    configMap: {name: {{ .Release.Name }}-contract}
  - name: keys
    secret: {secretName: {{ .Values.keys }}, defaultMode: 0440, items: [{key: keys.yaml, path: keys.yaml}]}
  - name: tmp
    emptyDir: {}
{{- range $name, $claim := dict "models" .Values.models "prompts" .Values.promptsClaim }}
{{- if $claim }}
  - name: {{ $name }}
    persistentVolumeClaim: {claimName: {{ $claim }}, readOnly: true}
{{- end }}
{{- end }}
{{- with .Values.tls }}
  - name: tls
    secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* of every container */}}
{{- define "servanda.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: contract, mountPath: /etc/servanda, readOnly: true}
  - {name: keys, mountPath: /etc/servanda-keys, readOnly: true}
  - {name: tmp, mountPath: /tmp}
{{- range $name, $claim := dict "models" .Values.models "prompts" .Values.promptsClaim }}
{{- if $claim }}
  - {name: {{ $name }}, mountPath: /{{ $name }}, readOnly: true}
{{- end }}
{{- end }}
{{- if .Values.tls }}
  - {name: tls, mountPath: /etc/servanda-tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* the options of both listeners */}}
{{- define "servanda.tls" -}}
{{- if .Values.tls }}, --tls-cert, /etc/servanda-tls/tls.crt, --tls-key, /etc/servanda-tls/tls.key{{ end }}
{{- end -}}

{{/* a probe's scheme */}}
{{- define "servanda.scheme" -}}
{{- if .Values.tls }}, scheme: HTTPS{{ end }}
{{- end -}}

{{/* further options, each in quotes */}}
{{- define "servanda.args" -}}
{{- range . }}, {{ . | toString | quote }}{{ end }}
{{- end -}}

{{/* one leader by its Service, and several by their pods */}}
{{- define "servanda.leaders" -}}
{{- $scheme := ternary "https" "http" (ne .Values.tls "") }}
{{- if eq (int .Values.leader.replicas) 1 }}, --leader, "{{ $scheme }}://{{ .Release.Name }}-leader:8081"
{{- else }}
{{- range $i := until (int .Values.leader.replicas) }}, --leader, "{{ $scheme }}://{{ $.Release.Name }}-leader-{{ $i }}.{{ $.Release.Name }}-leaders:8081"{{ end }}
{{- end }}
{{- end -}}

{{/* leader and gateways read the same contract when they start */}}
{{- define "servanda.annotations" -}}
servanda.dev/contract: {{ printf "%s\n%s" .Values.contract .Values.prompts | sha256sum | trunc 16 | quote }}
{{- end -}}
